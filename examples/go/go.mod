module triptych.dev/examples/go

go 1.19

require (
	github.com/golang/protobuf v1.5.4
	google.golang.org/genproto/googleapis/rpc v0.0.0-20240318140521-94a12d6c2237
	google.golang.org/grpc v1.64.1
	google.golang.org/protobuf v1.34.2
	triptych.dev/gen v0.0.0
)

// Made by generate.sh.
replace triptych.dev/gen => ./gen
