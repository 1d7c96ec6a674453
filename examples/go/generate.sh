#!/bin/sh
# Generates the Go messages and stubs of protos/triptych/v1 into a folder (default: gen, beside this file).
# Needs protoc, protoc-gen-go and protoc-gen-go-grpc.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
gen=${1:-$here/gen}
mkdir -p "$gen"
protoc -I "$here/../../protos" \
	--go_out="$gen" --go_opt=module=triptych.dev/gen \
	--go-grpc_out="$gen" --go-grpc_opt=module=triptych.dev/gen \
	triptych/v1/common.proto triptych/v1/inference.proto
cat > "$gen/go.mod" <<END
module triptych.dev/gen

go 1.19

require (
	google.golang.org/grpc v1.64.1
	google.golang.org/protobuf v1.34.2
)
END
