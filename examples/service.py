"""The service with a key: start it, make a key, compile for a GPU by curl and by the Python client.

In production: `roller keys add NAME --store DIR` once, then `roller serve --store DIR`. NVRTC is needed for the GPU's binary
(pip install 'roller-svc[cuda]'); this example asks for an estimate and for a kernel of the CPU.
"""

import json
import socket
import subprocess
import sys
import tempfile

from roller_svc.client import Client
from roller_svc.client.schemas import CompileRequest

ROLLER = [sys.executable, "-m", "roller_svc"]
BODY = {"expression": "y[i] = exp(x[i])", "inputs": {"x": {"dtype": "float32", "shape": [1024]}}, "target": "cpu-x86-avx2"}

with tempfile.TemporaryDirectory() as store, socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    key = subprocess.run(
        [*ROLLER, "keys", "add", "alice", "--store", store], check=True, capture_output=True, text=True
    ).stdout.split()[-1]
    server = subprocess.Popen([*ROLLER, "serve", "--store", store, "--port", str(port), "--workers", "1", "--no-calibrate"])
    try:
        url = f"http://127.0.0.1:{port}"
        curl = ["curl", "-s", "--retry-connrefused", "--retry", "30", "--retry-delay", "1", f"{url}/v1/kernels:compile"]
        headers = [f"Authorization: Bearer {key}", "Content-Type: application/json", "Prefer: wait=60"]
        curl += [word for header in headers for word in ("-H", header)]
        answer = subprocess.run([*curl, "-d", json.dumps(BODY)], check=True, capture_output=True, text=True).stdout
        print("curl:", json.loads(answer)["response"]["language"], "for", json.loads(answer)["response"]["target"])
        with Client(url, api_key=key) as client:
            operation = client.compile(CompileRequest(**BODY))
            print("Python:", operation.metadata.cache)
    finally:
        server.terminate()
        server.wait()
