"""What package.json must list."""

import pytest

from serving.worker.contents import PackageError, read_listing

FILES = {"model.onnx": "12", "golden.json": "34"}


def test_a_listing_holds_name_version_and_files() -> None:
    listing = read_listing({"schema": 1, "name": "m", "version": "2", "files": FILES, "labels": ["a"]})
    assert (listing.name, listing.version, listing.files) == ("m", "2", FILES)


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ([], "schema None, schema 1 is needed"),
        ({"schema": "1"}, "schema '1', schema 1 is needed"),
        ({"schema": 1, "name": "m", "files": FILES}, "lacks name, version or files"),
        ({"schema": 1, "name": "m", "version": "2", "files": 3}, "lacks name, version or files"),
        ({"schema": 1, "name": "m", "version": "2", "files": {"golden.json": "34"}}, "does not list model.onnx"),
    ],
)
def test_another_schema_or_shape_is_named(package: object, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        read_listing(package)
