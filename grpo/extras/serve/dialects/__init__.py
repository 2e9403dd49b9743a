"""APIs in which clients ask for messages of the policy, as pure functions in message space; see `request`."""

from grpo.extras.serve.dialects.anthropic import ANTHROPIC
from grpo.extras.serve.dialects.chat import CHAT
from grpo.extras.serve.dialects.completions import COMPLETIONS
from grpo.extras.serve.dialects.responses import RESPONSES
from grpo.extras.serve.dialects.token_ids import TOKENS

DIALECTS = {  # by the path of a request
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
    "/inference/v1/generate": TOKENS,
}
