#!/usr/bin/env bash
# Runs compose.yaml for real, with podman (or Docker, where a daemon answers), and prints what happens:
# builds the images, starts the three services, looks at how locked up they are, streams from another
# container, kills the executor's container in the middle of streams (from the command line, from the
# Go example of the profile `sidecar`, from a program that draws tokens itself), scales the tokenizer
# to two, drains one of them, and removes all that it made.
#
#   make test-compose
#   BASE=localhost/debian BUILD_FLAGS="--volume /etc/pip.conf:/etc/pip.conf:ro" make test-compose
#
# BASE: the images' base, where debian:bookworm-slim cannot be pulled.
set -euo pipefail
cd "$(dirname "$0")/.."

project=triptych-test  # of its own: what is removed at the end is what was made here
skip() { echo "test-compose: skipped, $1"; exit 0; }
if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
  engine=docker compose=(docker compose -p "$project")
else
  # The one of `make setup` before Debian's, which knows neither profiles nor --scale.
  command=$(PATH=$PWD/.venv/bin:$PATH command -v podman-compose) || command=
  if [ -z "$command" ] || ! command -v podman >/dev/null; then
    skip "neither podman with podman-compose nor a Docker daemon is here"
  fi
  "$command" --help | grep -q -- --profile || skip "$command knows no --profile: 1.1 or newer is needed"
  engine=podman compose=("$command" -p "$project")
fi
model=.models/SmolLM2-135M-Instruct.Q4_1.gguf
[ -e $model ] || skip "run \`make model\` first"
MODELS=${MODELS:-$(dirname "$(readlink -f $model)")}
# Ports of the host that are free. podman takes no ranges for several containers.
export MODELS GRPC_PORTS="" HTTP_PORTS=""
tokens=400

say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }
fail() { echo "test-compose: $1" >&2; exit 1; }
# Shows what a command wrote only if it fails: podman says a lot about systemd where that is missing.
quietly() { "$@" >"$out/log" 2>&1 || { cat "$out/log"; fail "failed: $*"; }; }
container() {
  $engine ps -a --format '{{.Names}}' | grep -E "^${project}[-_]$1[-_]${2:-1}\$" || fail "no container of $1"
}
inspect() { $engine inspect --format "$2" "$1"; }
# The health check that compose.yaml gives the container. Docker runs it; podman needs systemd for that,
# which containers and CI machines often lack, so that it is asked to run it now.
healthy() {
  if [ $engine = podman ]; then podman healthcheck run "$1" >/dev/null 2>&1
  else [ "$(inspect "$1" '{{.State.Health.Status}}')" = healthy ]; fi
}
serving() {
  for name in "$@"; do
    for _ in $(seq 120); do healthy "$name" && break; sleep 0.5; done
    healthy "$name" || { "${compose[@]}" logs; fail "$name: its health check fails"; }
    echo "$name: its health check passes"
  done
}
# Arguments of `triptych`, in a container beside the stack.
client() {
  timeout 120 $engine run --rm --no-healthcheck --read-only --network ${project}_default triptych:cpu "$@"
}
generate() {  # HOST
  client generate "Once upon a time" --seed 1 --ignore-eos --max-tokens "$tokens" --address "$1:50051" 2>&1
}
sidecar() { timeout 120 "${compose[@]}" --profile sidecar run --rm -T --no-deps sidecar "$@" 2>"$out/sidecar.log"; }
size() { wc -c < "$1"; }
# Waits until a stream has brought a quarter of what it brings undisturbed.
quarter() {  # FILE UNDISTURBED
  for _ in $(seq 600); do [ -e "$1" ] && [ "$(size "$1")" -ge $(($(size "$2") / 4)) ] && return; sleep 0.05; done
  fail "nothing streams"
}
# What kill_executor needs to know, found out before there is any hurry.
aim() {
  pid=$(inspect "$executor" '{{.State.Pid}}') restarts=$(inspect "$executor" '{{.RestartCount}}')
  command=$($engine exec "$executor" sh -c 'tr "\0" " " < /proc/1/cmdline')
  [[ $command == *"triptych executor "* ]] || fail "not the executor: $command"
}
# Kills process 1 of the executor's container, and so all in it, in the middle of a stream.
kill_executor() {  # FILE UNDISTURBED
  local had
  quarter "$1" "$2"
  kill -9 "$pid"
  had=$(size "$1")
  echo "killed process $pid ($command) after $had of $(size "$2") bytes"
  [ "$had" -lt $(($(size "$2") * 3 / 4)) ] || fail "too late for the middle"
  for _ in $(seq 100); do
    [ "$(inspect "$executor" '{{.RestartCount}} {{.State.Running}}')" = "$((restarts + 1)) true" ] && break; sleep 0.1
  done
  [ "$(inspect "$executor" '{{.RestartCount}}')" = $((restarts + 1)) ] || fail "the container was not started again"
  echo "started again as process $(inspect "$executor" '{{.State.Pid}}'), restart $((restarts + 1))"
}
# Without the times that the last line tells.
untimed() { sed 's/, first after .* tokens\/s)//' "$1"; }
same() {  # FILE UNDISTURBED
  cmp <(untimed "$1") <(untimed "$2") || fail "the stream differs"
  echo "it went on: the same text to the end, $(grep '^\[.*tokens' "$1")"
}
requests() {  # CONTAINER: requests that a tokenizer process has taken
  $engine exec "$1" python -c '
import re, urllib.request
text = urllib.request.urlopen("http://127.0.0.1:8000/metrics").read().decode()
print(int(float(re.search(r"^triptych:requests_total\S* (\S+)$", text, re.MULTILINE)[1])))'
}

# podman-compose leaves what --scale has added, and with it what that depends on.
down() {
  [ $engine = docker ] || podman ps -aq --filter "name=^$project" | xargs -r podman rm -f --depend
  "${compose[@]}" --profile sidecar down -v
}

out=$(mktemp -d)
clean() {
  trap - EXIT
  jobs -p | xargs -r kill 2>/dev/null || true
  down >/dev/null 2>&1 || true
  rm -rf "$out"
}
trap clean EXIT

say "build"
$engine version --format '{{.Client.Version}}' | sed "s/^/$engine /"
"${compose[@]}" version 2>/dev/null | grep -i compose
build() {  # TAG FLAGS...
  # shellcheck disable=SC2086,SC2046
  $engine build -q $([ $engine = podman ] && echo --format docker) ${BASE:+--build-arg BASE=$BASE} ${BUILD_FLAGS:-} \
    -t "triptych:$1" "${@:2}" . >"$out/built" 2>&1 || { cat "$out/built"; fail "triptych:$1 is not built"; }
  $engine images --format '{{.Repository}}:{{.Tag}}  {{.Size}}' | grep "triptych:$1 "
}
build cpu --target cpu
build go-example --file examples/go/Dockerfile
# shellcheck disable=SC2016
$engine run --rm --no-healthcheck --entrypoint sh triptych:cpu -c \
  'for tool in cc gcc g++ c++ clang make pip pip3; do ! command -v $tool || exit 1; done' ||
  fail "the image holds a compiler or pip"
echo "no compiler and no pip in triptych:cpu"

say "up"
quietly "${compose[@]}" up -d
tokenizer=$(container tokenizer) executor=$(container executor) scheduler=$(container scheduler)
serving "$scheduler" "$executor" "$tokenizer"

say "what the containers may do"
for name in "$scheduler" "$executor" "$tokenizer"; do
  $engine exec "$name" sh -c '! touch /opt/x /etc/x /x 2>/dev/null' || fail "$name: its root can be written"
  $engine exec "$name" cat /proc/1/status >"$out/status"
  told=$(awk '/^(Uid|CapEff|CapBnd|NoNewPrivs):/ {printf "%s %s  ", $1, $2}' "$out/status")
  [ "$told" = "Uid: 10001  CapEff: 0000000000000000  CapBnd: 0000000000000000  NoNewPrivs: 1  " ] ||
    fail "$name: $told"
  limits=$(inspect "$name" '{{.HostConfig.Memory}} bytes, {{.HostConfig.PidsLimit}} processes')
  [[ ! $limits =~ (^0|\ 0) ]] || fail "$name has no limits: $limits"
  echo "$name: root read-only, user 10001, no capabilities, no new privileges; $limits"
done

say "a stream, from another container"
generate tokenizer | tee "$out/undisturbed"

say "the executor's container is killed in the middle of a stream"
aim
generate tokenizer > "$out/disturbed" &
stream=$!
kill_executor "$out/disturbed" "$out/undisturbed"
wait $stream || fail "the stream ended"
same "$out/disturbed" "$out/undisturbed"

say "the sidecar: the Go example, everything that it does"
sidecar | tee "$out/all" || { cat "$out/sidecar.log"; fail "the sidecar failed"; }

say "the executor's container is killed in the middle of the sidecar's stream"
serving "$executor"
sidecar dns:///tokenizer:50051 generate "Once upon a time" $tokens > "$out/go-undisturbed"
aim
sidecar dns:///tokenizer:50051 generate "Once upon a time" $tokens > "$out/go-disturbed" &
stream=$!
kill_executor "$out/go-disturbed" "$out/go-undisturbed"
wait $stream || { cat "$out/sidecar.log"; fail "the stream ended"; }
same "$out/go-disturbed" "$out/go-undisturbed"

say "a container beside it draws the tokens itself; the executor's is killed in the middle"
serving "$executor"
greedy=(client generate "Once upon a time" --temperature 0 --max-tokens "$tokens" --address tokenizer:50051)
"${greedy[@]}" > "$out/greedy" 2>/dev/null
aim
# It needs the volume of the sockets, and to be the same user.
timeout 120 $engine run --rm -i --no-healthcheck --read-only --network ${project}_default \
  --volume ${project}_run:/run/triptych --entrypoint python triptych:cpu - \
  tokenizer:50051 /run/triptych/engine "Once upon a time" $tokens <examples/python/own_sampler.py >"$out/own" &
stream=$!
kill_executor "$out/own" "$out/greedy"
wait $stream || fail "the stream ended"
cmp "$out/greedy" <(sed '$d' "$out/own") || fail "not what the engine's own greedy draw says"
echo "it went on: the text of the engine's own greedy draw, $(tail -n 1 "$out/own")"

say "two tokenizers"
quietly "${compose[@]}" up -d --scale tokenizer=2
second=$(container tokenizer 2)
serving "$executor" "$tokenizer" "$second"
$engine exec "$tokenizer" sh -c 'ls /run/triptych/engine/*.control.sock'
before=("$(requests "$tokenizer")" "$(requests "$second")")
sidecar | cmp - "$out/all" || fail "the sidecar's answers differ"
echo "its answers are those of before"
after=("$(requests "$tokenizer")" "$(requests "$second")")
answered=($((after[0] - before[0])) $((after[1] - before[1])))
echo "of the sidecar's requests the first took ${answered[0]}, the second ${answered[1]}"
[ "${answered[0]}" -gt 0 ] && [ "${answered[1]}" -gt 0 ] || fail "one of them was not asked"

say "the executor's container is killed in the middle of a stream of each"
rm "$out/disturbed"
aim
generate "$tokenizer" > "$out/disturbed" &
streams=($!)
generate "$second" > "$out/second" &
streams+=($!)
quarter "$out/disturbed" "$out/undisturbed"
kill_executor "$out/second" "$out/undisturbed"
for stream in "${streams[@]}"; do wait "$stream" || fail "a stream ended"; done
same "$out/disturbed" "$out/undisturbed"
same "$out/second" "$out/undisturbed"

say "drain: the first tokenizer is stopped in the middle of a stream"
serving "$executor"
generate "$tokenizer" > "$out/drained" &
stream=$!
quarter "$out/drained" "$out/undisturbed"
echo "SIGTERM after $(size "$out/drained") of $(size "$out/undisturbed") bytes"
quietly $engine stop -t 60 "$tokenizer"
wait $stream || fail "the stream was cut"
same "$out/drained" "$out/undisturbed"
echo "then it ended, with exit code $(inspect "$tokenizer" '{{.State.ExitCode}}')"
sidecar dns:///tokenizer:50051 generate "Once upon a time" $tokens > "$out/other"
cmp "$out/other" "$out/go-undisturbed" || fail "the other tokenizer's answer differs"
echo "the other one answers"

say "down"
quietly down
! $engine ps -a --format '{{.Names}}' | grep "^$project" || fail "containers are left"
! $engine volume ls --format '{{.Name}}' | grep "^$project" || fail "volumes are left"
echo "no container and no volume is left"

say "done"
