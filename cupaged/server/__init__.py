"""The gRPC service: a supervisor, an engine process, and front ends that speak gRPC."""
