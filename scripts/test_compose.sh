#!/usr/bin/env bash
# Runs compose.yaml for real, with podman (or Docker, where a daemon answers), and prints what happens:
# builds the image, starts the three services, streams from another container, kills the executor in the
# middle of a stream, adds a second tokenizer, drains, removes all that it made.
#
#   make test-compose
#   BASE=localhost/debian BUILD_FLAGS="--volume /etc/pip.conf:/etc/pip.conf:ro" make test-compose
#
# BASE: the image's base, where debian:bookworm-slim cannot be pulled.
set -euo pipefail
cd "$(dirname "$0")/.."

if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
  engine=docker; compose="docker compose -p triptych-test"
elif command -v podman >/dev/null && command -v podman-compose >/dev/null; then
  engine=podman; compose="podman-compose -p triptych-test"
else
  echo "test-compose: skipped, neither podman with podman-compose nor a Docker daemon is here"; exit 0
fi
model=.models/SmolLM2-135M-Instruct.Q4_1.gguf
[ -e $model ] || { echo "test-compose: skipped, run \`make model\` first"; exit 0; }
# A project of its own: what is removed at the end is what was made here.
project=triptych-test
export MODELS=${MODELS:-$(dirname "$(readlink -f $model)")}

say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }
fail() { echo "test-compose: $1" >&2; exit 1; }
container() { $engine ps -a --format '{{.Names}}' | grep -E "^${project}[-_]$1[-_]1\$" || true; }
client() { timeout 120 $engine run --rm --network ${project}_default triptych:cpu "$@"; }
generate() { client generate "Once upon a time" --seed 1 --max-tokens "$1" --address tokenizer:50051; }
healthy() { $engine exec "$(container tokenizer)" triptych-probe 127.0.0.1:50051 triptych.v1.InferenceService; }

out=$(mktemp -d)
clean() {
  [ -z "${second:-}" ] || $engine rm -f "$second" >/dev/null 2>&1 || true  # `down` leaves what `run` made
  $compose down -v >/dev/null 2>&1 || true
  rm -rf "$out"
}
trap clean EXIT

say "build"
# shellcheck disable=SC2086
$engine build -q $([ $engine = podman ] && echo --format docker) --target cpu -t triptych:cpu ${BASE:+--build-arg BASE=$BASE} ${BUILD_FLAGS:-} .
$engine images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep triptych:cpu
$engine run --rm --entrypoint sh triptych:cpu -c \
  'id -u; for tool in gcc g++ cc pip; do ! command -v $tool || exit 1; done' || fail "the image holds a compiler or pip"

say "up"
$compose up -d scheduler executor tokenizer >"$out/up" 2>&1 || { cat "$out/up"; fail "not started"; }
[ -n "$(container tokenizer)" ] || { cat "$out/up"; fail "not started"; }
for _ in $(seq 120); do healthy >/dev/null 2>&1 && break; sleep 1; done
healthy || { $compose logs; fail "not serving"; }

say "a stream, from another container"
generate 64 | tee "$out/undisturbed"

say "the executor is killed in the middle of a stream"
generate 64 > "$out/disturbed" &
stream=$!
for _ in $(seq 200); do [ -s "$out/disturbed" ] && break; sleep 0.1; done
pid=$($engine inspect --format '{{.State.Pid}}' "$(container executor)")
kill -9 "$pid" 2>/dev/null || $engine kill --signal KILL "$(container executor)"
echo "killed after $(wc -c < "$out/disturbed") bytes"
wait $stream || fail "the stream ended"
cmp "$out/undisturbed" "$out/disturbed" || fail "the stream differs"
echo "it went on: the same $(wc -c < "$out/disturbed") bytes"

say "a second tokenizer process"
ours() { $engine ps --format '{{.Names}}' | grep "^$project" | sort; }
ours > "$out/before"
$compose run -d --no-deps tokenizer >"$out/run" 2>&1 || { cat "$out/run"; fail "not started"; }
second=$(ours | comm -13 "$out/before" -)
for _ in $(seq 60); do
  $engine exec "$(container tokenizer)" ls /run/triptych/engine | grep -q tokenizer-1.control.sock && break; sleep 1
done
$engine exec "$(container tokenizer)" sh -c 'ls /run/triptych/engine/*.sock'
$engine stop -t 30 "$second" >/dev/null; $engine rm -f "$second" >/dev/null 2>&1 || true; second=

say "drain: the tokenizer is stopped in the middle of a stream"
generate 64 > "$out/drained" &
stream=$!
for _ in $(seq 200); do [ -s "$out/drained" ] && break; sleep 0.1; done
$engine stop -t 60 "$(container tokenizer)" >/dev/null
wait $stream || fail "the stream was cut"
cmp "$out/undisturbed" "$out/drained" || fail "the stream differs"
echo "it was finished first"

say "done"
