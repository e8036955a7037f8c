"""Served vLLM as a rollout engine: servers in other processes or on other hosts, reached over HTTP.

engine     ServedEngine: the protocol over one or many servers, requests answered one by one, one server for checks
pool       which server a request goes to, and what becomes of it when that one fails
server     one server as the pool sees it
requests   prompts and seeds as requests, answers as completions and scores
protocol   what a server has to have; bodies of requests and their answers: ids, images, log-probs, weight versions
client    ServerClient: one server's HTTP calls, with deadlines and a key; which failures another server may answer
command    how a server of this machine is started: its command line and environment
launch     servers of this machine: started, watched, and ended with whoever started them
server_key    a key in front of every endpoint of a server
transfer   the learner's end of a weight transfer: by files, or by broadcast over gloo or NCCL
chunks     weights on their way, in chunks of a bounded size
groups     a process group of the learner and one server's workers, for broadcasts with a deadline
plugin     what mm_grpo adds to vLLM's workers: backends of its weight transfer, and an account of what came
plugin_engines    the receiving end of a weight transfer
"""
