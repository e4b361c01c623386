"""The whole: the OpenAI ingress, the app of ingress and replicas, the command line (`python -m cluster`)."""
