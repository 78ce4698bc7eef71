"""Run gcp-storage-emulator in memory, with Google's rules for compose: `python -m tests.support.gcs_server PORT`.

The emulator composes anything. According to https://cloud.google.com/storage/docs/json_api/v1/objects/compose and
https://cloud.google.com/storage/docs/composite-objects the service

- accepts 1 to 32 objects of one bucket, by name and optional generation, and answers 400 to more objects;
- checks `ifGenerationMatch` of each source and of the destination (0 means no object), and answers 412;
- gives a composed object a CRC-32C, no MD5, and the total number of components of its sources;
- replaces a destination, which may be one of the sources.
"""

from __future__ import annotations

import base64
import sys
import time
from http import HTTPStatus
from typing import Any

import google_crc32c
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

MOST = 32


def compose(request: Any, response: Any, storage: Any, *_: Any, **__: Any) -> None:
    bucket, name = request.params["bucket_name"], request.params["object_id"]
    wanted = request.data.get("sourceObjects", ())
    if not 1 <= len(wanted) <= MOST:
        problem = (
            f"The number of source components provided ({len(wanted)}) is not from 1 to the maximum ({MOST})"
        )
        _refuse(response, HTTPStatus.BAD_REQUEST, problem)
        return
    parts, components = [], 0
    for source in wanted:
        stored = _object(storage, bucket, source["name"])
        if stored is None or source.get("generation", stored["generation"]) != stored["generation"]:
            _refuse(response, HTTPStatus.NOT_FOUND, f"Object {source['name']} not found")
            return
        match = source.get("objectPreconditions", {}).get("ifGenerationMatch")
        if match is not None and str(match) != stored["generation"]:
            _refuse(response, HTTPStatus.PRECONDITION_FAILED, "Precondition Failed")
            return
        parts.append(storage.get_file(bucket, source["name"]))
        components += int(stored.get("componentCount", 1))
    there = _object(storage, bucket, name)
    match = request.query.get("ifGenerationMatch", [None])[0]
    if match is not None and match != (there["generation"] if there else "0"):
        _refuse(response, HTTPStatus.PRECONDITION_FAILED, "Precondition Failed")
        return
    data = b"".join(parts)
    crc32c = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
    generation = str(time.time_ns())
    now = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
    made = {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{generation}",
        "name": name,
        "bucket": bucket,
        "generation": generation,
        "metageneration": "1",
        "timeCreated": now,
        "updated": now,
        "storageClass": "STANDARD",
        "size": str(len(data)),
        "contentType": request.data.get("destination", {}).get("contentType"),
        "crc32c": crc32c,
        # The emulator reads this key when it serves the object.
        "md5Hash": None,
        "etag": generation,
        "componentCount": components,
    }
    storage.create_file(bucket, name, data, made)
    response.json(made)


def _object(storage: Any, bucket: str, name: str) -> Any:
    try:
        return storage.get_file_obj(bucket, name)
    except NotFound:
        return None


def _refuse(response: Any, status: HTTPStatus, message: str) -> None:
    response.status = status
    response.json({"error": {"code": int(status), "message": message}})


def main() -> None:
    # This must happen before the server builds its table of handlers.
    objects.compose = compose
    from gcp_storage_emulator.server import create_server

    create_server("127.0.0.1", int(sys.argv[1]), True).run()


if __name__ == "__main__":
    main()
