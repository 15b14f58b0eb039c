# Serve the database POSTGRES_DB (by default named as its user) with the password POSTGRES_PASSWORD.
set -eu
data=/var/lib/postgresql/data
if [ ! -e "$data/PG_VERSION" ]; then
    install -d -o postgres -m 700 "$data"
    password=$(mktemp)
    printf '%s' "$POSTGRES_PASSWORD" >"$password"
    chown postgres "$password"
    setpriv --reuid=postgres --regid=postgres --clear-groups initdb -D "$data" -U "$POSTGRES_USER" \
        --pwfile="$password" --auth=scram-sha-256 --encoding=UTF8
    rm "$password"
    echo "host all all all scram-sha-256" >>"$data/pg_hba.conf"
    echo "CREATE DATABASE \"${POSTGRES_DB:-$POSTGRES_USER}\"" | setpriv --reuid=postgres --regid=postgres --clear-groups \
        postgres --single -D "$data" postgres
fi
install -d -o postgres /var/run/postgresql
exec setpriv --reuid=postgres --regid=postgres --clear-groups postgres -D "$data" -c listen_addresses='*'
