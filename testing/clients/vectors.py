#!/usr/bin/env python3
"""Clients of embeddings and rerankers, unmodified, against a server with an embedding model.

    vectors.py URL NAME...    runs the tests with these names
"""

import sys

import requests

URL = sys.argv[1]
V1 = URL + "/v1"
MODEL = requests.get(V1 + "/models", timeout=10).json()["data"][0]["id"]
QUERY = "What keeps ships away from rocks at night?"
TEXTS = ["A lighthouse warns ships with its lamp.", "Bread rises because yeast makes gas.",
         "An index lets a database find rows quickly."]


def cosine(a, b):
    dot = lambda x, y: sum(p * q for p, q in zip(x, y))
    return dot(a, b) / (dot(a, a) * dot(b, b)) ** 0.5


def check(query, texts):
    scores = [cosine(query, text) for text in texts]
    assert max(scores) == scores[0] > scores[1] + 0.1, scores


def openai():
    from openai import OpenAI

    client = OpenAI(base_url=V1, api_key="none")
    made = client.embeddings.create(model=MODEL, input=[QUERY, *TEXTS])
    vectors = [one.embedding for one in made.data]
    check(vectors[0], vectors[1:])
    plain = client.embeddings.create(model=MODEL, input=QUERY, encoding_format="float").data[0].embedding
    assert max(abs(a - b) for a, b in zip(plain, vectors[0])) < 1e-5
    short = client.embeddings.create(model=MODEL, input=QUERY, dimensions=64).data[0].embedding
    assert len(short) == 64 and abs(cosine(short, plain[:64]) - 1) < 1e-5
    many = client.embeddings.create(model=MODEL, input=["a text"] * 2048)
    assert [one.index for one in many.data] == list(range(2048))


def langchain():
    from langchain_openai import OpenAIEmbeddings

    # Texts are sent as they are: the tokens of OpenAI's models are not those of this one.
    made = OpenAIEmbeddings(base_url=V1, api_key="none", model=MODEL, check_embedding_ctx_length=False)
    check(made.embed_query(QUERY), made.embed_documents(TEXTS))


def llama_index():
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    made = OpenAILikeEmbedding(model_name=MODEL, api_base=V1, api_key="none")
    check(made.get_query_embedding(QUERY), made.get_text_embedding_batch(TEXTS))


def rerank():
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        body = {"model": MODEL, "query": QUERY, "documents": TEXTS[::-1], "top_n": 2, "return_documents": True}
        made = requests.post(URL + path, json=body, timeout=60).json()["results"]
        assert [one["index"] for one in made][0] == 2 and made[0]["document"]["text"] == TEXTS[0], made
    pairs = {"model": MODEL, "text_1": QUERY, "text_2": TEXTS}
    scores = [one["score"] for one in requests.post(V1 + "/score", json=pairs, timeout=60).json()["data"]]
    assert max(scores) == scores[0], scores


for name in sys.argv[2:]:
    globals()[name]()
    print("ok", name)
