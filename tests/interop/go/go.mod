module orca.serving/tests/interop/go

go 1.26.0

require (
	golang.org/x/net v0.58.0
	google.golang.org/genproto/googleapis/rpc v0.0.0-20261019180522-ce908d29299b
	google.golang.org/grpc v1.83.2
	google.golang.org/protobuf v1.36.12
	orca.serving/examples/go v0.0.0
)

require (
	golang.org/x/sys v0.47.0 // indirect
	golang.org/x/text v0.41.0 // indirect
)

replace orca.serving/examples/go => ../../../examples/go
