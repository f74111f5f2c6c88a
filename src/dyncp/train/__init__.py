"""The demo training job: a small Llama-style decoder, on many ranks and in one process.

`model` is the example of attention layers that run under dyncp; `loop` trains it.
"""
