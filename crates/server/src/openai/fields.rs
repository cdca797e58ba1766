//! Request fields of OpenAI, vLLM and SGLang that are known but not read: refused by name, or
//! without an effect on the answer.

use crate::http::Refused;

const fn refused(name: &'static str, instead: &'static str) -> Refused {
    Refused { name, neutral: "null", instead }
}

/// Fields that would change a generated answer.
pub(crate) const GENERATION: &[Refused] = &[
    refused("allowed_token_ids", "use guided_regex or guided_choice"),
    refused("audio", "this model writes text only"),
    refused("bad_words", "use logit_bias, or a grammar that excludes them"),
    refused("beam_width", "beam search is not implemented"),
    refused("chat_template", "the model's own template is used; see chat_template_kwargs"),
    refused("documents", "use chat_template_kwargs.documents"),
    refused("ebnf", "write the grammar in Lark and send it as guided_grammar"),
    refused("function_call", "use tool_choice"),
    refused("functions", "use tools"),
    refused("guided_whitespace_pattern", "the white space of JSON is bounded by the server"),
    refused("include_stop_str_in_output", "stop strings are never part of the answer"),
    refused("kv_transfer_params", "this server keeps its own cache"),
    Refused { name: "length_penalty", neutral: "1.0", instead: "beam search is not implemented" },
    refused("logits_processors", "use logit_bias or a grammar"),
    Refused { name: "modalities", neutral: "[\"text\"]", instead: "this model writes text only" },
    refused("no_stop_trim", "stop strings are never part of the answer"),
    refused("prompt_embeds", "send text or token ids"),
    refused("return_tokens_as_token_ids", "use return_token_ids"),
    Refused {
        name: "skip_special_tokens",
        neutral: "true",
        instead: "special tokens are never part of the answer",
    },
    refused("stop_regex", "use stop"),
    refused("structural_tag", "use tools or response_format"),
    refused("use_beam_search", "beam search is not implemented"),
    refused("web_search_options", "use tools"),
];

/// Fields that do not change an answer: labels, storage, and the order of service.
pub(crate) const NO_EFFECT: &[&str] = &[
    "guided_decoding_backend",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
];
