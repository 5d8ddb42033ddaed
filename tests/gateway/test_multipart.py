"""Bodies of forms, in pieces of any size, right ones and wrong ones."""

import random

import httpx
import pytest

import gateway.batches.upload  # noqa: F401 -- silences the parser's log
from gateway.http.errors import ApiError
from gateway.http.multipart import MultipartReader, Part, boundary_of


def read(body: bytes, boundary: bytes, sizes: list[int], seed: int = 0) -> tuple[bool, list[tuple[Part, bytes]]]:
    reader, rng = MultipartReader(boundary), random.Random(seed)
    parts: list[tuple[Part, bytes]] = []
    at = 0
    while at < len(body):
        piece = body[at : at + rng.choice(sizes)]
        at += len(piece)
        for found in reader.feed(piece):
            if isinstance(found, Part):
                parts.append((found, b""))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + found)
    return reader.is_complete, parts


@pytest.mark.parametrize("seed", range(200))
def test_httpx_form_is_read_piecewise(seed: int) -> None:
    """A form written by httpx is read whatever its content and the sizes of its pieces."""
    rng = random.Random(seed)
    content = bytes(rng.choice(b"\r\n-a") for _ in range(rng.randrange(100)))
    asked = httpx.Request("POST", "http://x/", data={"purpose": "batch"}, files={"file": ("ü 1.jsonl", content)})
    boundary = boundary_of(asked.headers["content-type"])
    assert boundary is not None
    complete, parts = read(asked.read(), boundary, [1, 2, 3, 7, 1000], seed)
    assert complete
    assert parts == [(Part("purpose", None), b"batch"), (Part("file", "ü 1.jsonl"), content)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--b--\r\n', [("a", b"1")]),
        (b"\r\n--b\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n--b--after", [("a", b"")]),
        (b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n--b\r\n\r\n--b--', [("a", b"--b\r\n")]),
    ],
)
def test_forms_of_other_programs_are_read(body: bytes, expected: list[tuple[str, bytes]]) -> None:
    """Forms as other programs write them are read in pieces of any size."""
    for sizes in ([1], [5], [1000]):
        complete, parts = read(body, b"b", sizes)
        assert complete and [(part.name, content) for part, content in parts] == expected


@pytest.mark.parametrize(
    "body",
    [
        b"--b\r\n\r\n1\r\n--b--",
        b"--b\r\nContent-Disposition: attachment; name=a\r\n\r\n1\r\n--b--",
        b"--bx\r\n",
        b"--b" + b" " * 100,
        b"--b\r\nA: " + b"x" * 5000,
    ],
)
def test_malformed_form_is_refused(body: bytes) -> None:
    """A malformed form is refused with invalid_multipart."""
    for sizes in ([1], [1000]):
        with pytest.raises(ApiError) as caught:
            read(body, b"b", sizes)
        assert caught.value.code == "invalid_multipart"


def test_unfinished_form_is_incomplete() -> None:
    """A form without its end is not complete, and its content is passed on as it comes."""
    reader = MultipartReader(b"b")
    for _ in reader.feed(b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n'):
        pass
    for _ in range(100):
        assert sum(len(piece) for piece in reader.feed(b"\r\n--" * 1000) if isinstance(piece, bytes)) > 3900
    assert not reader.is_complete


@pytest.mark.parametrize(
    ("parameters", "filename"),
    [
        ('filename="ü 1.jsonl"', "ü 1.jsonl"),
        ('filename="a;b=\\"c\\".jsonl"', 'a;b="c".jsonl'),
        ("filename=a.jsonl", "a.jsonl"),
        ("filename*=utf-8''%C3%BC%201.jsonl", "ü 1.jsonl"),
        ("filename=\"u.jsonl\"; filename*=UTF-8'de'%e2%82%ac.jsonl", "€.jsonl"),
        ("filename*=utf-8''%ff%zz", "\ufffd%zz"),
        ("filename*=undefined''x", None),
        ('filename=""', ""),
        ("filename=\"a; filename*=utf-8''b\"", "a; filename*=utf-8''b"),
        ('filename="\\"filename*=x"', '"filename*=x'),
        ("x=y", None),
    ],
)
def test_file_names_are_decoded(parameters: str, filename: str | None) -> None:
    """A file name comes out right in each form that clients write; no other codec of Python is named."""
    head = f'--b\r\nContent-Disposition: form-data; name="file"; {parameters}\r\n\r\nx\r\n--b--'
    for sizes in ([1], [1000]):
        assert read(head.encode(), b"b", sizes)[1] == [(Part("file", filename), b"x")]


def test_form_has_few_parts() -> None:
    """A form of very many parts is refused at the first that is too many."""
    part = b'\r\n--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
    assert len(read(part * 16, b"b", [1000])[1]) == 16
    with pytest.raises(ApiError) as caught:
        read(part * 10_000, b"b", [1 << 20])
    assert caught.value.code == "invalid_multipart"


def test_bad_forms_write_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Bytes of a form are not written to the log by the parser."""
    with pytest.raises(ApiError):
        read(b"--secret", b"b", [1000])
    assert not caplog.records


def test_random_part_heads_never_crash() -> None:
    """Part heads of random bytes are read or refused without another exception."""
    rng = random.Random(1)
    words = [
        b"name",
        b"filename",
        b"*",
        b"0",
        b"=",
        b"''",
        b'"',
        b"\\",
        b"%ff",
        b"utf-8",
        b"undefined",
        b";",
        b"\xff",
        b"\r\n ",
        b"a",
    ]
    for _ in range(5_000):
        head = b"Content-Disposition: form-data; name=a;" + b"".join(rng.choices(words, k=rng.randrange(12)))
        try:
            _, parts = read(b"--b\r\n" + head + b"\r\n\r\nx\r\n--b--", b"b", [1000])
        except ApiError:
            continue
        for part, _ in parts:
            f"{part.name}{part.filename}".encode()
        boundary_of(f"multipart/form-data; {head.decode('latin-1')}")


@pytest.mark.parametrize(
    "value", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=a", 'multipart/form-data; boundary=""',
              f"multipart/form-data; boundary={'a' * 71}"],
)  # fmt: skip
def test_other_media_types_have_no_boundary(value: str) -> None:
    """Other media types, and boundaries that are empty or too long, give no boundary."""
    assert boundary_of(value) is None
