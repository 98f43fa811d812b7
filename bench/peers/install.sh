#!/usr/bin/env bash
# Install each peer in a separate environment, because its pinned versions conflict with ours: bench/peers/.env/{flower,pfl_research}
set -euo pipefail
cd "$(dirname "$0")"
for peer in "flower flwr[simulation]==1.41.0" "pfl_research pfl[pytorch]==0.6.0"; do
    set -- $peer
    [ -x ".env/$1/bin/python" ] || "${PYTHON:-python3}" -m venv ".env/$1"
    ".env/$1/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy "$2"
done
