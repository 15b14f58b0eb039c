# Serve AMQP with the user RABBITMQ_DEFAULT_USER and the password RABBITMQ_DEFAULT_PASS.
set -eu
cat >/etc/rabbitmq/rabbitmq.conf <<END
listeners.tcp.1 = 0.0.0.0:5672
loopback_users = none
default_user = $RABBITMQ_DEFAULT_USER
default_pass = $RABBITMQ_DEFAULT_PASS
END
chown -R rabbitmq: /var/lib/rabbitmq
exec rabbitmq-server
