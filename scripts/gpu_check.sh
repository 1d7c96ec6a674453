#!/usr/bin/env bash
# Everything that needs a GPU, in one run of at most eight minutes, without a network:
#
#     OUT=build/gpu scripts/gpu_check.sh          (SECONDS_IN_ALL=480, PYTHON=python3)
#
# Builds the native modules into $WORK, runs tests/gpu, then bench/gpu.py. Needs Python 3.11 or
# later with torch (CUDA) and triton, a C++ compiler, cmake and ninja; Python packages that are
# missing come from build/wheels (`make gpu-wheels`, for Python 3.12). Everything that is learned
# goes to $OUT as it comes, so that a run which is cut short leaves the rest:
#
#     machine.txt   what ran it            build.txt          how it was built
#     tests.txt     tests/gpu              tests.xml          the same, for machines
#     gpu.md        tables of the benchmark, gpu.json the same, bench.txt what it said
#     summary.txt   a line for each part, with its seconds
#
# Ends with 1 where the build, or a test, failed.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gpu}
WORK=${WORK:-build/gpu-work}
WHEELS=${WHEELS:-build/wheels}
PYTHON=${PYTHON:-python3}
IN_ALL=${SECONDS_IN_ALL:-480}
mkdir -p "$OUT" "$WORK"
OUT=$(realpath "$OUT") WORK=$(realpath "$WORK")
SITE=$WORK/site
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PATH=$SITE/bin:$PATH
# Nothing of the machine's own: neither its pytest plug-ins, nor a warning of another version of torch
# as an error.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_ADDOPTS="-p pytest_timeout -W default"
failed=0
: >"$OUT/summary.txt"

left() { echo $((IN_ALL - SECONDS)); }

# part NAME SECONDS FILE COMMAND...: run it, with its output into FILE, and note how it ended.
part() {
  local name=$1 limit=$2 file=$3 begun=$SECONDS status=0
  shift 3
  if [ "$limit" -lt 5 ]; then
    echo "$name: no time left" | tee -a "$OUT/summary.txt"
    return 1
  fi
  timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$OUT/$file"
  status=${PIPESTATUS[0]}
  echo "$name: exit $status after $((SECONDS - begun)) s" | tee -a "$OUT/summary.txt"
  return "$status"
}

machine() {
  nvidia-smi || echo "nvidia-smi is not here"
  uname -mr
  "$PYTHON" -c "
import sys, torch, triton
print('python', sys.version.split()[0], 'torch', torch.__version__, 'triton', triton.__version__)
print('CUDA', torch.version.cuda, 'available', torch.cuda.is_available())
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0))
"
  command -v c++ cmake ninja ptxas compute-sanitizer
  git rev-parse HEAD 2>/dev/null || true
}

build() {
  set -e
  if compgen -G "$WHEELS/*.whl" >/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "$WHEELS"/*.whl
  fi
  "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation --no-compile --upgrade \
    --target "$SITE" -C build-dir="$WORK/native" .
  (cd "$WORK" && "$PYTHON" -c "
import triptych.kernels.cpu._cpu, triptych.v1.stage_pb2, triptych.services.executor.worker
print('built', triptych.__file__)
")
}

export -f machine build
export PYTHON SITE WORK WHEELS
part machine 60 machine.txt bash -c machine
if part build "$(left)" build.txt bash -c build; then
  # A third of the time that is left stays for the benchmark.
  part tests $(($(left) * 2 / 3)) tests.txt "$PYTHON" -P -m pytest -q -p no:cacheprovider \
    --junitxml="$OUT/tests.xml" tests/gpu || failed=1
  part bench $(($(left) - 5)) bench.txt "$PYTHON" -P bench/gpu.py --out "$OUT" \
    --seconds $(($(left) - 45)) || failed=1
else
  failed=1
fi
cat "$OUT/summary.txt"
exit $failed
