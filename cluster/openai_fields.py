"""Fields of other servers' APIs that this one knows and does not implement, and those that may be ignored.

What would change the answer must not be ignored silently: it is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# name -> the values, besides null, that ask for nothing.
_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    # tools
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # structured output, beside what openai_grammar reads
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    # templates come from the server
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "reasoning_effort": (),
    "reasoning": (),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    # other media
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "mm_processor_kwargs": ({},),
    # the prompt
    "suffix": ("",),
    "echo": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    # sampling and stopping
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    # the form of the answer
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "return_hidden_states": (False,),
    "stream_interval": (1,),
    # scheduling, sessions, state
    "priority": (0,),
    "store": (False,),
    "background": (False,),
    "previous_response_id": (),
    "session_id": (),
    "session_params": (),
    "kv_transfer_params": (),
    "lora_path": (),
    "extra_key": (),
}

UNSUPPORTED_IN_CHAT: Mapping[str, tuple[Any, ...]] = {**_EVERYWHERE, "add_special_tokens": (False,), "prompt": ()}
UNSUPPORTED_IN_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_EVERYWHERE,
    "add_special_tokens": (True,),
    "messages": (),
    "top_logprobs": (0,),
}

# In a message: what an assistant's earlier turn would need to be rendered with.
UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "audio": (),
    "prefix": (False,),
}

# Known, and without influence on the answer.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "include_reasoning",
        "separate_reasoning",
        "request_id",
        "rid",
    }
)
HARMLESS_IN_MESSAGE = frozenset({"refusal", "annotations", "id"})

UNSUPPORTED_ROLES = frozenset({"tool", "function"})
UNSUPPORTED_PARTS = frozenset(
    {"image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "file", "refusal", "image_embeds"}
)

# Template variables that a request may set.
TEMPLATE_OPTIONS = frozenset({"enable_thinking"})
