"""The OpenAPI document of the endpoint: what HAProxy and the handler answer, for tools and for people."""

from typing import Any

from serving.rundir import Model
from serving.topology import Limits
from serving.worker.protocol import DEFAULT_TOP_K, MAX_IMAGES

JSON = "application/json"
BINARY = "application/octet-stream"

Schema = dict[str, Any]


def document(model: Model, limits: Limits) -> Schema:
    """Return the document (OpenAPI 3.1) of a stack that serves `model`."""
    infer = f"/v2/models/{model.name}"
    paths = {
        f"/predictions/{model.name}": {"post": _predict(limits), "put": _predict(limits)},
        "/healthz": _info("whether the endpoint is alive", _object(status={"const": "alive"})),
        "/readyz": _info("whether a replica is ready", _READY, also=("503",)),
        "/v2": _info(
            "the server, by the Open Inference Protocol", _object(name=_TEXT, version=_TEXT, extensions=_TEXTS)
        ),
        "/v2/health/live": _info("whether the endpoint is alive", _object(live={"const": True})),
        "/v2/health/ready": _info("whether a replica is ready", _V2_READY, error="V2Error", also=("503",)),
    }
    for base in (infer, f"{infer}/versions/{model.version}"):
        paths |= {
            base: _info("the model's tensors", _METADATA),
            f"{base}/ready": _info("whether a replica is ready", _V2_READY, error="V2Error", also=("503",)),
            f"{base}/infer": {"post": _infer(model)},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{model.name}, an image classifier", "version": model.version},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR, "V2Error": _object(error=_TEXT), "Prediction": _PREDICTION}},
    }


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": sorted(properties)}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


_TEXT: Schema = {"type": "string"}
_TEXTS = _list(_TEXT)
_COUNT: Schema = {"type": "integer", "minimum": 0}
_READY = _object(status={"const": "ready"}, replicas=_COUNT, of=_COUNT)
_V2_READY = _object(name=_TEXT, ready={"const": True})
_ERROR = _object(error=_object(code=_TEXT, message=_TEXT))
_RANKED = _list(_object(label=_TEXT, index=_COUNT, probability={"type": "number", "minimum": 0, "maximum": 1}))
_PREDICTION = _object(
    predictions={"anyOf": [_RANKED, _list(_RANKED)]},
    model=_TEXT,
    version=_TEXT,
    digest={"type": "string", "pattern": "^[0-9a-f]{64}$"},
)
_TENSORS = _list(_object(name=_TEXT, datatype=_TEXT, shape=_list({"type": "integer"})))
_METADATA = _object(name=_TEXT, versions=_TEXTS, platform=_TEXT, inputs=_TENSORS, outputs=_TENSORS)
_REASONS = {
    "400": "the request is not understood; the message says what is",
    "408": "the request did not arrive in time",
    "413": "more bytes, pixels or images than the limit",
    "415": "an image format or an encoding that is not read",
    "500": "the fault is ours",
    "502": "the replica ended while it answered; sending the request again is safe",
    "503": "no replica is ready, or there is no room; try again after Retry-After",
    "504": "the replica did not answer in time",
}


def _answer(description: str, schema: Schema, *, kind: str = JSON) -> Schema:
    return {"description": description, "content": {kind: {"schema": schema}}}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _errors(name: str, statuses: tuple[str, ...]) -> Schema:
    """Return the answers with these statuses. What HAProxy itself refuses has the ordinary shape on every path."""
    shapes = [_reference(shape) for shape in dict.fromkeys((name, "Error"))]
    schema = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    return {status: _answer(_REASONS[status], schema) for status in statuses}


def _info(about: str, schema: Schema, *, error: str = "Error", also: tuple[str, ...] = ()) -> Schema:
    """Return a path that answers GET and HEAD."""
    answers = {"200": _answer(about, schema), **_errors(error, ("400", *also))}
    head = {status: {"description": answer["description"]} for status, answer in answers.items()}
    return {"get": {"summary": about, "responses": answers}, "head": {"summary": about, "responses": head}}


def _predict(limits: Limits) -> Schema:
    image: Schema = {"type": "string", "format": "binary", "contentMediaType": "image/*"}
    encoded = {"type": "string", "contentEncoding": "base64", "minLength": 1}
    several = {"type": "array", "items": encoded, "minItems": 1, "maxItems": MAX_IMAGES}
    top_k = {"type": "integer", "minimum": 1}
    body = {
        "anyOf": [
            _closed({"image": encoded, "top_k": top_k}, required="image"),
            _closed({"images": several, "top_k": top_k}, required="images"),
            several,
            encoded,
        ]
    }
    form = {"type": "object", "properties": {"data": {"type": "string", "format": "binary"}}, "required": ["data"]}
    return {
        "summary": "classify one image, or several",
        "description": f"JPEG, PNG, WebP, GIF, BMP or TIFF, whatever the Content-Type says; at most "
        f"{limits.body_bytes} bytes and {MAX_IMAGES} images. Content-Encoding may be gzip or deflate.",
        "parameters": [
            {
                "name": "top_k",
                "in": "query",
                "description": f"how many of the likeliest classes come back; {DEFAULT_TOP_K} if not given",
                "schema": top_k,
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                BINARY: {"schema": image},
                "multipart/form-data": {"schema": form},
                JSON: {"schema": body},
            },
        },
        "responses": {
            "200": _answer(
                "the likeliest classes, first the likeliest; a list of such lists for several", _reference("Prediction")
            ),
            **_errors("Error", tuple(_REASONS)),
        },
    }


def _closed(properties: dict[str, Schema], *, required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}


def _infer(model: Model) -> Schema:
    height, width, channels = model.image_shape
    outputs = _list(
        {"type": "object", "properties": {"name": _TEXT, "datatype": _TEXT}, "required": ["name", "datatype"]}
    )
    answer = _object(model_name=_TEXT, model_version=_TEXT, outputs=outputs)
    tensor = {
        "type": "object",
        "properties": {
            "name": {"enum": ["images", "image"]},
            "datatype": {"enum": ["UINT8", "BYTES"]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
            "data": {"type": "array"},
        },
        "required": ["name", "datatype", "shape"],
    }
    inputs = {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1}
    return {
        "summary": "classify images, by the Open Inference Protocol",
        "description": f"One input: images, UINT8 [B, {height}, {width}, {channels}], or image, BYTES [B], of files. "
        "With Inference-Header-Content-Length, so many bytes are JSON and tensors follow them.",
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": {"type": "object", "properties": {"inputs": inputs}, "required": ["inputs"]}}},
        },
        "responses": {"200": _answer("the tensors", answer), **_errors("V2Error", tuple(_REASONS))},
    }
