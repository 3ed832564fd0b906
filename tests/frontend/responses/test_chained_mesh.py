"""A chained conversation on a whole mesh: the prefix cache serves it as it serves the same conversation sent whole."""

from pathlib import Path
from typing import Any

import httpx

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.frontend.whole_mesh import MODEL, whole_mesh

QUESTION = "Tell me a long story of a fox who lived in the woods and of all that he saw there in winter."


def test_the_second_turn_of_a_chain_finds_the_first_in_the_cache(tmp_path: Path) -> None:
    with whole_mesh(tmp_path, Path(CHECKPOINT_DIR), 1024) as url, httpx.Client(base_url=url, timeout=60) as http:

        def ask(**fields: Any) -> dict[str, Any]:
            body = {"model": MODEL, "temperature": 0, "max_output_tokens": 40, "kvmesh": {"disaggregate": False}}
            reply = http.post("/v1/responses", json=body | fields)
            assert reply.status_code == 200, reply.text
            answer: dict[str, Any] = reply.json()
            return answer

        first = ask(input=QUESTION)
        chained = ask(input="And then?", previous_response_id=first["id"])
        said = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "And then?"}]
        whole = ask(input=said, store=False)
        cached = [answer["usage"]["input_tokens_details"]["cached_tokens"] for answer in (first, chained, whole)]
        assert cached[0] == 0
        assert cached[1] >= first["usage"]["input_tokens"] // 16 * 16 > 0, "all full blocks of the first prompt"
        assert whole["usage"]["input_tokens"] == chained["usage"]["input_tokens"]
        assert cached[2] >= chained["usage"]["input_tokens"] // 16 * 16 - 16, "the same tokens, so all is cached now"
