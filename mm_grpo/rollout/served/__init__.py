"""Served vLLM as a rollout engine: servers in other processes or on other hosts, reached over HTTP.

engine         ServedEngine: the rollout engine over one or many servers; ServedReplica: one server for checks
pool           load balancing and failover over servers
protocol       endpoints, bodies of requests and their answers: ids, images, log-probs, weight versions
videos         frames of videos in requests, and the server's reader of them
client         ServerClient: one server's HTTP calls, with deadlines and a key
launch         servers of this machine: command line, start, watch, end
with_adapters  a server with LoRA layers
server_key     a key in front of every endpoint of a server at a port
transfer       the learner's end of a weight transfer: by files, or by broadcast over gloo or NCCL
plugin         the other end, in vLLM's workers, with a record of what came
broadcast      code of both ends of a broadcast: chunks of tensors, a process group with a deadline
"""
