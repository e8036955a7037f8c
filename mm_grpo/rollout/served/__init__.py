"""Served vLLM as a rollout engine: servers in other processes or on other hosts, reached over HTTP.

engine      ServedEngine: the interface over one or many servers, requests answered one by one, one server for checks
pool        which server a request goes to, and what becomes of it when that one fails
protocol    what a server has to have; bodies of requests and their answers: ids, images, log-probs, weight versions
client      ServerClient: one server's HTTP calls, with deadlines and a key; which failures another server may answer
launch      servers of this machine: their command lines, started, watched, and ended with whoever started them;
            with_adapters is one with LoRA layers
server_key  a key in front of every endpoint of a server at a port
transfer    the learner's end of a weight transfer: by files, or by broadcast over gloo or NCCL
plugin      the other end, in vLLM's workers: what it takes, and an account of what came
broadcast   what both ends know of a broadcast: chunks of tensors, and a process group with a deadline
"""
