#!/usr/bin/env bash
# Puts into build/wheels what scripts/gpu_check.sh needs beside torch, triton, numpy and
# transformers on a machine without a network: Linux on x86-64, Python 3.12 (PYTHON_VERSION=...).
# Versions are those of constraints.txt. About 15 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
WHEELS=${WHEELS:-build/wheels}
PYTHON=${PYTHON:-.venv/bin/python}
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
# What builds: the native modules and protos. What runs: the executor. What tests.
PACKAGES=(
  grpcio grpcio-tools mypy-protobuf pathspec protobuf pybind11 scikit-build-core
  gguf googleapis-common-protos packaging psutil pyyaml pyzmq
  hypothesis iniconfig pluggy pygments pytest pytest-timeout sortedcontainers
)
PLATFORMS=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux_2_5; do
  PLATFORMS+=(--platform "${tag}_x86_64")
done
rm -rf "$WHEELS"
"$PYTHON" -m pip --disable-pip-version-check -q download --no-deps --only-binary=:all: \
  --python-version "$PYTHON_VERSION" --implementation cp "${PLATFORMS[@]}" \
  -c constraints.txt -d "$WHEELS" "${PACKAGES[@]}"
du -sh "$WHEELS"
