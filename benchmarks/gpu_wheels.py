"""The wheels that gpu_proof.py needs on a GPU machine without an index: `make gpu-wheels`.

    python benchmarks/gpu_wheels.py FOLDER [--python 3.12] [--vllm 0.25.1]

The machine is taken to have torch with CUDA, transformers, peft and pytest, with what these need. PACKAGES are what
mm_grpo and the stages import beside; versions are those of requirements/cpu.txt, or the newest of what it lacks.
vLLM comes without the parts in UNUSED, and of its requirements with OF_VLLM: torch alone is larger than all else here.
Of qwen-vl-utils only its videos need av, which stays away too.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

PINS = Path(__file__).parents[1] / "requirements" / "cpu.txt"
PACKAGES = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "ruamel-yaml", "qwen-vl-utils", "datasets",
    "dill", "multiprocess", "trl", "fla-core", "flash-linear-attention",
)  # fmt: skip
OF_VLLM = (
    "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "compressed-tensors", "email-validator", "fastapi", "jsonschema",
    "jsonschema-specifications", "llguidance", "loguru", "mistral-common", "msgspec", "openai", "openai-harmony",
    "partial-json-parser", "pybase64", "pycountry", "pydantic-extra-types", "python-multipart", "pyzmq", "referencing",
    "rpds-py", "sniffio", "starlette", "xgrammar",
)  # fmt: skip
"""What vLLM's engine and its worker for a GPU import besides."""
UNUSED = ("vllm/*_vllm_fa2_C*", "vllm/_moe_C*", "vllm/vllm-rs*", "vllm/third_party/*/*")
"""FlashAttention 2, for cards before the H100; mixtures of experts; a server; kernels for other models' formats. Of
third_party its own files stay: pynvml.py finds the GPU."""


def pinned(name: str, pins: str) -> str:
    """
    >>> pinned("trl", "torch==2.13.0\\ntrl==1.16.0\\n"), pinned("fla-core", "trl==1.16.0")
    ('trl==1.16.0', 'fla-core')
    """
    found = re.search(rf"^{re.escape(name)}==\S+", pins, re.MULTILINE)
    return found[0] if found else name


def asked_by(wheel: Path, names: Iterable[str]) -> list[str]:
    """`names`, with the versions that a wheel asks for."""
    with zipfile.ZipFile(wheel) as whole:
        (file,) = (name for name in whole.namelist() if name.endswith(".dist-info/METADATA"))
        lines = re.findall(r"^Requires-Dist: ([\w-]+)([^;\n]*)", whole.read(file).decode(), re.MULTILINE)
    asked = {name.lower().replace("_", "-"): name + versions for name, versions in reversed(lines)}
    return [asked.get(name, name) for name in names]


def trim(wheel: Path) -> None:
    """Write a wheel anew without its UNUSED files, in its list of files (RECORD) too."""
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(part, "w") as kept:
        for entry in whole.infolist():
            if _is_unused(entry.filename):
                continue
            content = whole.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not _is_unused(line.partition(",")[0])).encode()
            kept.writestr(entry, content, zipfile.ZIP_LZMA)  # half of what pip is used to
    part.replace(wheel)


def _is_unused(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in UNUSED)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the GPU machine (3.12)")
    parser.add_argument("--vllm", help="its version, where it is wanted")
    args = parser.parse_args(argv)
    pins = PINS.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    for platform in ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 32))):
        command += ["--platform", f"{platform}_x86_64"]
    command += ["--python-version", args.python, "--dest", str(args.folder)]
    wanted = [pinned(name, pins) for name in PACKAGES] + ([f"vllm=={args.vllm}"] if args.vllm else [])
    subprocess.run([*command, *wanted], check=True)
    for wheel in args.folder.glob("vllm-*.whl"):
        trim(wheel)
        subprocess.run([*command, *asked_by(wheel, OF_VLLM)], check=True)
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(args.folder.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 1e6:>8.1f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:>8.1f} MB  {len(sizes)} wheels in {args.folder}")


if __name__ == "__main__":
    main()
