"""LiteLLM's functions for OpenAI's Containers, at another server. Run by LiteLLM's interpreter; prints JSON.

python containers.py API_BASE KEY
"""

import json
import sys

import litellm

PLACE = {"custom_llm_provider": "openai", "api_base": sys.argv[1], "api_key": sys.argv[2]}

made = litellm.create_container(name="of litellm", **PLACE)
found = litellm.retrieve_container(container_id=made.id, **PLACE)
listed = litellm.list_containers(**PLACE)
deleted = litellm.delete_container(container_id=made.id, **PLACE)
print(
    json.dumps(
        {
            "id": made.id,
            "name": found.name,
            "listed": [each.id for each in listed.data],
            "deleted": deleted.deleted,
        }
    )
)
