"""All that a gRPC caller meets: the server, its guard, the methods of `orca.v1.Orca`."""
