"""What package.json must list."""

import pytest

from serving.worker.contents import PackageError, read_listing

FILES = {"model.onnx": "12", "golden.json": "34"}
SIZE = {"height": 8, "width": 9, "channels": 3}
WHOLE = {"schema": 1, "name": "m", "version": "2", "files": FILES, "labels": ["a", "b"], "preprocessing": SIZE}


def test_a_listing_holds_what_the_archive_is_called_and_what_it_takes() -> None:
    listing = read_listing(WHOLE)
    assert (listing.name, listing.version, listing.files) == ("m", "2", FILES)
    assert (listing.image_shape, listing.classes, listing.provider) == ((8, 9, 3), 2, "cpu")


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ([], "schema None, schema 1 is needed"),
        ({"schema": "1"}, "schema '1', schema 1 is needed"),
        ({"schema": 1, "name": "m", "files": FILES}, "lacks name, version, files, labels or preprocessing"),
        (WHOLE | {"files": 3}, "lacks name, version, files"),
        (WHOLE | {"preprocessing": {"height": 8}}, "lacks name, version, files"),
        (WHOLE | {"files": {"golden.json": "34"}}, "does not list model.onnx"),
    ],
)
def test_another_schema_or_shape_is_named(package: object, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        read_listing(package)
