#!/bin/sh
# Installs the rivals that do not come with torch, beside it and without changing it: torchft's own
# requirements would replace torch. Run it with the python of the benchmarks' environment first in PATH.
set -eu
before=$(python -c 'import torch; print(torch.__version__)')
python -m pip install --quiet --no-deps torchft==0.2.0
# The recovery is measured against torchft's newest: in a directory of its own, which only those processes look into.
# Where it cannot be had, they find 0.2.0.
rivals=$(dirname "$0")/../build/rivals
rm -rf "$rivals/torchft"
python -m pip install --quiet --no-deps --target "$rivals/torchft" torchft-nightly==2026.10.26 ||
    echo "torchft-nightly is not to be had here: torchft 0.2.0 takes its place" >&2
python -m pip install --quiet opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
after=$(python -c 'import torch; print(torch.__version__)')
if [ "$before" != "$after" ]; then
    echo "torch changed from $before to $after: install torch==${before%%+*} again" >&2
    exit 1
fi
python -c 'import torchft'
