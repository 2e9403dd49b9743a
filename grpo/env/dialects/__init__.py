"""APIs in which clients ask for messages of the policy, as pure functions in message space; see `calls`."""

from grpo.env.dialects.anthropic import ANTHROPIC
from grpo.env.dialects.chat import CHAT
from grpo.env.dialects.completions import COMPLETIONS
from grpo.env.dialects.responses import RESPONSES
from grpo.env.dialects.tokens import TOKENS

DIALECTS = {  # by the path of a request
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
    "/inference/v1/generate": TOKENS,
}
