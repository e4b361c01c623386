"""What a replica is: an engine behind `contract`, its blocks, tokenizer, step-time model, and the deployment around it."""
