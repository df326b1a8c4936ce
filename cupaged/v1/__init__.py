"""Messages and stubs of the gRPC interface `cupaged.v1`, generated from cupaged/server/proto.

`generation_pb2`, `model_pb2` and `admin_pb2` hold the messages, `*_pb2_grpc` the stubs and
servicers. `make protos` writes them; nothing here is edited by hand.
"""
