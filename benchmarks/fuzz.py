"""Damage saved folders at random and load them: nothing may crash, hang, grow or change a live model.

Every case mutates one file of a copy of a folder (benchmarks/fuzz_kinds.py: models of ours with and without a manifest
that fits, run folders in shards, Hugging Face's in BF16, FP8 and NVFP4, Transformer Engine's .pt, LoRA adapters,
tokenizers, chat templates, run.toml, data) and loads it. A case is refused (one line of te-models), harmless
(everything loaded as saved) or accepted although it differs; without hashes, changed values of weights cannot be told
from others. Anything else is a failure: an exception of another type, more than 5 seconds in each of four attempts (a
template has 10 of its own), more memory than twice the folder plus 256 MiB, the death of the process, or a changed live
model.

    python -m benchmarks.fuzz --cases 10000 --seed 2 --out benchmarks/results/fuzz_cpu.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import torch

from benchmarks.fuzz_kinds import KINDS, SECONDS, Live, make_folders
from te_models.config.toml import render_toml
from te_models.errors import TeModelsError
from te_models.saving.folder import MANIFEST, _digest

MEMORY = 256 * 2**20
ODD_VALUES = (
    None, True, False, 0, -1, 1, 2, 10**6, 10**12, 10**30, -(2**63), 0.5, -0.0, 1e308, "", "x", "../x", "a" * 5000, [],
    {},
    [[]] * 3, {"$tensor": "x"}, "NaN",
)  # fmt: skip
FRAGMENTS = (  # of harmful templates
    "{{ 1 // 0 }}", "{% include 'x' %}", "{% import 'os' as os %}", "{{ ''.__class__.__mro__ }}", "{{ 'x' * 10**10 }}",
    "{{ messages | attr('__init__') | attr('__globals__') }}",
    "{% set x = 'a' %}{% for i in range(60) %}{% set x = x ~ x %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('a\nb' * 999) }}",
    "{{ range(10**12) | list }}",
    "{{ cycler.__init__.__globals__.os.environ }}", "{{ strftime_now('%' * 99999) }}", "{{ lipsum(n=10**6) }}",
    "{{ self }}",
    "{{ messages | tojson(indent=10**9) }}", "{{ (messages * 10**7) | length }}", "{{ namespace.__init__ }}",
    "{% break %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ '%999999999d' | format(1) }}",
    "{{ 9 ** 9 ** 9 }}", "{{ 'a'.__format__('9999999999') }}", "{{ messages | map('attr', 'x') | list }}",
    "{{ undefined.x }}",
)  # fmt: skip


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, inserted, swapped or repeated."""
    changed, place = bytearray(data), rng.randrange(max(1, len(data)))
    kind = rng.choice(["bit", "bytes", "cut", "insert", "swap", "zero", "repeat", "number"])
    if kind == "bit" and changed:
        changed[place] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        changed[place : place + 4] = rng.randbytes(4)
    elif kind == "cut":
        del changed[place : place + rng.choice([1, 8, 10**9])]
    elif kind == "insert":
        changed[place:place] = rng.randbytes(rng.randrange(1, 9))
    elif kind == "swap":
        changed[place : place + 4], changed[:4] = changed[:4], changed[place : place + 4]
    elif kind == "zero":
        changed[place : place + 16] = bytes(len(changed[place : place + 16]))
    elif kind == "repeat":
        changed[place:place] = changed[place : place + 200] * rng.randrange(1, 200)
    else:
        changed[place : place + 8] = struct.pack("<q", rng.choice([-1, 0, 2**31, 2**62, len(data)]))
    return bytes(changed)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """One value somewhere in a document replaced, removed, renamed, doubled or nested."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        changed = dict(value) if isinstance(value, dict) else list(value)
        kind = rng.choice(["inside", "inside", "inside", "remove", "rename"])
        if kind == "inside":
            changed[key] = mutate_json(value[key], rng)
        elif kind == "remove":
            del changed[key]
        elif isinstance(changed, dict):
            changed[rng.choice([f"{key}x", "", "layers.0", "name"])] = changed.pop(key)
        else:
            changed.append(changed[key])
        return changed
    if type(value) in (int, float) and rng.random() < 0.5:
        return rng.choice([value + 1, value * 2, -value, value * 10**9, str(value), [value]])
    return rng.choice(ODD_VALUES)


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header of a safetensors file changed as a document, or some values replaced by odd ones."""
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]
    if rng.random() < 0.5:
        header = json.dumps(mutate_json(json.loads(header), rng)).encode()
        return struct.pack("<Q", len(header)) + header + data[8 + size :]
    body = bytearray(data[8 + size :])
    place = rng.randrange(max(1, len(body) // 4)) * 4
    body[place : place + 4] = struct.pack(
        "<f", rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e38])
    )
    return data[: 8 + size] + bytes(body)


def mutate_template(text: str, rng: random.Random) -> str:
    """A fragment that does harm somewhere in a template, or two pieces of it swapped."""
    place = rng.randrange(len(text))
    if rng.random() < 0.6:
        return text[:place] + rng.choice(FRAGMENTS) + text[place:]
    other = rng.randrange(len(text))
    return text[:place] + text[other : other + 20] + text[place:]


def mutate_lines(data: bytes, rng: random.Random) -> bytes:
    """One line of JSONL changed as a document, damaged, doubled, or in another encoding."""
    lines = data.splitlines()
    place = rng.randrange(len(lines))
    kind = rng.choice(["document", "document", "bytes", "deep", "join", "utf-16", "mark", "end"])
    if kind == "document":
        lines[place] = json.dumps(mutate_json(json.loads(lines[place]), rng)).encode()
    elif kind == "bytes":
        lines[place] = mutate_bytes(lines[place], rng)
    elif kind == "deep":
        lines[place] = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    elif kind == "join":
        lines[place] += b" " + lines[0]
    elif kind == "utf-16":
        return b"\n".join(lines).decode().encode("utf-16")
    elif kind == "mark":
        lines[0] = b"\xef\xbb\xbf" + lines[0]
    return b"\n".join(lines) + (b"" if kind == "end" else b"\n")


def mutate_toml(text: str, rng: random.Random) -> str:
    """One value in a TOML file changed as a document, if it has a form in TOML then."""
    tables = mutate_json(tomllib.loads(text), rng)
    tables = tables if isinstance(tables, dict) else {"run": tables}
    loose = {title: values for title, values in tables.items() if not isinstance(values, dict)}
    with contextlib.suppress(TypeError):
        first = render_toml({"run": loose}, "").replace("[run]\n", "")
        return first + render_toml(
            {title: v for title, v in tables.items() if title not in loose}, ""
        )
    return text


def mutate_file(path: Path, rng: random.Random) -> None:
    """Change one file; by its format, or byte by byte, or into something that is not a file."""
    data, kind = path.read_bytes(), rng.random()
    if kind < 0.02:
        path.unlink()
        choice = rng.choice(["gone", "pipe", "folder", "link", "loop"])
        if choice == "pipe":
            os.mkfifo(path)
        elif choice == "folder":
            path.mkdir()
        elif choice != "gone":
            path.symlink_to("/dev/zero" if choice == "link" else path.name)
    elif kind < 0.03:
        path.write_bytes(
            rng.choice(
                [
                    b"[" * 100_000,
                    b'{"a":' * 50_000,
                    b"",
                    b"[" + b"[]," * 10**6 + b"0]",
                    b"\xff" * 10**6,
                ]
            )
        )
    elif kind < 0.4 or path.suffix not in (
        ".json",
        ".safetensors",
        ".jinja",
        ".jsonl",
        ".gz",
        ".toml",
    ):
        path.write_bytes(mutate_bytes(data, rng))
    elif path.suffix == ".json":
        path.write_bytes(json.dumps(mutate_json(json.loads(data), rng)).encode())
    elif path.suffix == ".jinja":
        path.write_text(mutate_template(data.decode(), rng))
    elif path.suffix == ".toml":
        path.write_text(mutate_toml(data.decode(), rng))
    elif path.suffix == ".jsonl":
        path.write_bytes(mutate_lines(data, rng))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(mutate_lines(gzip.decompress(data), rng)))
    else:
        path.write_bytes(mutate_safetensors(data, rng))


def fit_manifest(folder: Path) -> None:
    """Make sizes, hashes and the digest fit again, as someone who knows the format can."""
    with contextlib.suppress(
        ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError
    ):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        for name, entry in manifest["files"].items():
            if _regular(folder / name):
                data = (folder / name).read_bytes()
                entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        manifest["digest"] = _digest(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))


def _regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def resident() -> int:
    """The peak resident memory of this process since `reset_peak`, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def run_cases(root: str, seed: int, first: int, count: int, results: Any) -> None:
    """Run cases `first` ... in this process and send (case, kind, file, outcome, seconds, bytes) of each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    live = Live(Path(root))
    references = load_all(Path(root), live)
    for case in range(first, first + count):
        results.put((case, "start", "", "", 0.0, 0))
        found = run_case(Path(root), seed, case, live, references)
        for _ in range(3):
            if not found[2].startswith("failure:") or found[3] < SECONDS:
                break
            found = run_case(
                Path(root), seed, case, live, references
            )  # was it this case, or a machine that is busy?
        results.put((case, *found))
    results.put(None)


def load_all(root: Path, live: Live) -> dict[str, Any]:
    """Return the state loaded from the undamaged folder of each kind that could be made."""
    return {
        k: kind.load(root / kind.folder, live)
        for k, kind in KINDS.items()
        if (root / kind.folder).is_dir()
    }


def run_case(
    root: Path, seed: int, case: int, live: Live, references: dict[str, Any]
) -> tuple[str, str, str, float, int]:
    """One case: its kind, the file that changed, the outcome, seconds and bytes of memory."""
    rng = random.Random(f"{seed} {case}")
    kind = rng.choice(sorted(references))
    folder, fits, load, limit = KINDS[kind]
    with tempfile.TemporaryDirectory(prefix="fuzz") as temp:
        copy = Path(temp) / "model"
        shutil.copytree(root / folder, copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        path = rng.choice(files)
        mutate_file(path, rng)
        for manifest in filter(_regular, copy.rglob(MANIFEST)):
            if fits:
                fit_manifest(manifest.parent)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        before, start = resident(), time.perf_counter()
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
            try:
                state = load(copy, live)
                outcome = "harmless" if state == references[kind] else "accepted, different"
            except TeModelsError as error:
                one_line = "\n" not in str(error) and len(str(error)) < 1200
                outcome = (
                    "refused"
                    if one_line
                    else f"failure: {len(str(error))} characters: {str(error)[:200]!r}"
                )
            except BaseException as error:  # any other error is a finding
                outcome = f"failure: {type(error).__module__}.{type(error).__name__}: {str(error)[:200]!r}"
        seconds, memory = time.perf_counter() - start, resident() - before
        size = max(size, sum(p.stat().st_size for p in files if _regular(p)))
    if seconds > limit:
        outcome = f"failure: {seconds:.1f} s ({outcome})"
    if memory > 2 * size + MEMORY:
        outcome = f"failure: {memory / 2**20:.0f} MiB ({outcome})"
    if live.digest() != live.before:
        outcome = f"failure: the live model changed ({outcome})"
        live.reset()
    return kind, path.name, outcome, seconds, memory


def fuzz(seed: int, cases: int, budget: float) -> dict[str, Any]:
    """Run cases in a separate process, which is replaced when it dies or hangs, for at most `budget` seconds."""
    begin, done = time.monotonic(), 0
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures: list[str] = []
    slowest, largest = 0.0, 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fuzz") as root:
        make_folders(Path(root))
        while done < cases and time.monotonic() - begin < budget:
            results: Any = context.SimpleQueue()
            worker = context.Process(
                target=run_cases, args=(root, seed, done, cases - done, results), daemon=True
            )
            worker.start()
            running, since = done, time.monotonic() + 60  # it imports torch first
            while time.monotonic() - begin < budget:
                if results.empty():
                    if not worker.is_alive() or time.monotonic() - since > 200:
                        failures.append(
                            f"case {running}: the process {'hangs' if worker.is_alive() else 'died'}"
                        )
                        print(failures[-1], file=sys.stderr, flush=True)
                        counts["?"]["failure"] += 1
                        done = running + 1
                        break
                    time.sleep(0.01)
                    continue
                if (found := results.get()) is None:
                    done = cases
                    break
                running, kind, file, outcome, seconds, memory = found
                since = time.monotonic()
                if kind == "start":
                    continue
                done = running + 1
                slowest, largest = max(slowest, seconds), max(largest, memory)
                counts[kind][outcome.split(":")[0]] += 1
                if outcome.startswith("failure"):
                    failures.append(f"case {running}, {kind}, {file}: {outcome}")
                    print(failures[-1], file=sys.stderr, flush=True)
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGKILL)
            worker.join()
    return {
        "seed": seed, "cases": sum(sum(c.values()) for c in counts.values()),
        "seconds": round(time.monotonic() - begin),
        "torch": torch.__version__, "python": sys.version.split()[0],
        "counts": {kind: dict(sorted(count.items())) for kind, count in sorted(counts.items())},
        "slowest_s": round(slowest, 2), "largest_mib": round(largest / 2**20), "failures": failures,
    }  # fmt: skip


def main() -> int:
    """Run the fuzzer and write its counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = fuzz(arguments.seed, arguments.cases, arguments.budget)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
