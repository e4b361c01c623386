"""Speculation: draft tokens that the model verifies along with the next one, several for the price of a step.

    known tokens  |#### computed ####| t |           a plain step computes t and draws the next token from its row
    with drafts   |#### computed ####| t | d1 d2 d3  a step with drafts draws one from each row: s0 s1 s2 s3

s1 is what a plain step would have drawn after d1, and d1 stands exactly if it is what was drawn, s0. Draws are a function of
(seed, choice, position) and of the row's logits, so the tokens are those of the plain way, whatever was drafted, and how often
a draft is accepted is the law's probability of it: the rule of Leviathan et al. (arXiv 2211.17192) for drafts that are certain.

    ngram.py    drafts from what was said before (prompt lookup)
    verify.py   how many of a chunk's draws stand
    depth.py    how many drafts pay, from what was accepted so far and what a token costs
    drafter.py  the three together, for the scheduler
"""
