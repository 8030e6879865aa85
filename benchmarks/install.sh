#!/bin/sh
# Installs the rivals that do not come with torch, beside it and without changing it: torchft's own
# requirements would replace torch. Run it with the python of the benchmarks' environment first in PATH.
set -eu
before=$(python -c 'import torch; print(torch.__version__)')
python -m pip install --quiet --no-deps torchft==0.2.0
python -m pip install --quiet opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
after=$(python -c 'import torch; print(torch.__version__)')
if [ "$before" != "$after" ]; then
    echo "torch changed from $before to $after: install torch==${before%%+*} again" >&2
    exit 1
fi
python -c 'import torchft'
