#!/usr/bin/env bash
# Builds the native modules with AddressSanitizer and UBSan into an environment of their own, and runs
# their tests there. Any report ends the run with an error.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/asan/venv
pip=(.venv/bin/python -m pip --disable-pip-version-check -q)

"${pip[@]}" wheel --no-build-isolation --no-deps -C build-dir=build/asan/native \
  -C cmake.define.TRIPTYCH_SANITIZE=ON -C cmake.build-type=RelWithDebInfo -C install.strip=false \
  -w build/asan .
[ -e $venv ] || .venv/bin/python -m venv --without-pip $venv
"${pip[@]}" --python $venv/bin/python install --no-deps --force-reinstall build/asan/triptych-*.whl
site=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/dependencies.pth"

# The interpreter itself is not instrumented: the runtime must come first, and what Python keeps at its
# end is no leak of ours. test_plan_allocations preloads an allocator of its own, which cannot be second.
LD_PRELOAD="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  $venv/bin/python -P -m pytest -q -p no:randomly -p no:cacheprovider --timeout 900 \
  tests/kernels tests/unit/test_batch*.py tests/property/test_batch_walk.py tests/property/test_twins.py \
  tests/unit/test_weight_cache.py tests/unit/test_near_weights.py tests/differential/test_quantized_plans.py \
  tests/property/test_batch_invariance.py \
  --deselect tests/kernels/test_plan_allocations.py::test_a_step_allocates_nothing "$@"
