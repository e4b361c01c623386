"""What stands between vLLM and our Engine (replicas/vllm_engine.py).

installed.py       which vLLM there is, and what of it is touched
options.py         our configuration as its arguments, and what it would refuse
memory.py          whether a model and its cache fit, and what would
start.py           from a configuration to a running engine, or to the reason why not
llm.py             vLLM itself: the only file here that imports it while requests are served
protocols.py       what the engine asks of it
sampling.py        a request's sampling parameters in vLLM's words
outputs.py         vLLM's outputs, statistics and errors in ours
telemetry.py       its statistics as EngineStats and step-time samples
kv_events.py       its KV events as ours
event_feed.py      the socket that they come from
loop_thread.py     the thread that all of it runs on
"""
