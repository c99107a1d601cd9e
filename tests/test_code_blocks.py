"""Every code block of README and the documentation works as it stands, or says why it is not run.

Comments above a block say what is done with it:

    <!-- not run: REASON -->
    <!-- needs a GPU: REASON -->
    <!-- continues the block before -->    run in the names of that block, after its code
    <!-- slow: REASON -->                  emulated by the full sweeps alone; else without kernels
    <!-- excerpt: FILE -->                 its lines are in FILE, in this order; `...` is a gap

Any other Python block runs by itself, on a GPU and emulated: with device="cpu" in place of
device="cuda", and CUTE_ATTN_EMULATE=1, as README tells the reader. A block whose first line is
`# path.py` is a module, which later blocks of the page may import. TOML blocks are spec files, and
are planned. Commands in shell blocks are checked, not run: targets, options, extras, names.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

import cute_attn
from cute_attn import cache
from cute_attn.cache import arch as arch_of_cache
from cute_attn.emulation import Emulation, current_emulation
from cute_attn.emulator import Emulator, FindingsError
from cute_attn.reference.mla import gathered, mla_expanded_reference

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

MARKS = ("not run", "needs a GPU", "continues the block before", "excerpt", "slow")
OPTIONAL = ("fla", "transformers")  # a block that imports one is skipped where it is not installed
GPU_ARCH = "sm_90a"  # of the examples: Blackwell has softmax attention at head_dim 256 alone

# What a block leaves behind, by a line that it has.
RESULTS = {
    "scale(x, y)\n": "torch.equal(y, 2 * x)",
    "function(x, y)\n": "torch.equal(y, x.flip(0))",
    "print(chosen.form.pattern)": "chosen.form.pattern == 'redux.sync(.min|.max){.abs}{.NaN}.f32'",
    "print(chosen.modifiers)": "chosen.modifiers == (2, 0, 1)",
    "def expanded(rows):": "error_of_parts(globals()) < 0.01",
    "# Of FlashInfer's wrappers": "error_of_pages(globals()) < 0.01",
}


def error_of_parts(names: dict[str, Any]) -> float:
    """The relative error of a prefill in parts over a latent cache, against one attention."""
    q, cached, new = (names[name].cpu() for name in ("q", "cached", "new_rows"))
    rows = gathered(names["kv_cache"].cpu(), names["block_table"].cpu(), cached)
    rows = torch.cat([rows, torch.zeros_like(new)], dim=1)
    for i, length in enumerate(cached.tolist()):
        rows[i, length : length + new.shape[1]] = new[i]
    exact, _ = mla_expanded_reference(
        *q.split([128, 64], dim=-1), *rows.split([512, 64], dim=-1),
        names["w_uk"].cpu(), names["w_uv"].cpu(),
        softmax_scale=192**-0.5, cache_seqlens=cached + new.shape[1],
    )  # fmt: skip
    return float((names["o"].cpu().double() - exact).norm() / exact.norm())


def error_of_pages(names: dict[str, Any]) -> float:
    """The larger relative error of o and of lse in base 2, over FlashInfer's pages."""
    q, pages, o, lse = (names[x].cpu().double() for x in ("q", "kv_cache", "o", "lse"))
    starts, firsts, places, last = (
        names[x].tolist() for x in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    )
    exact: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, used in enumerate(last):
        of_sequence = pages[places[firsts[i] : firsts[i + 1]]]
        rows = 16 * (len(of_sequence) - 1) + used
        k, v = of_sequence.transpose(0, 1).flatten(1, 2)[:, :rows].repeat_interleave(2, dim=2)
        queries = q[starts[i] : starts[i + 1]]
        scores = torch.einsum("qhd,khd->hqk", queries, k) * q.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(rows - len(queries))
        scores = scores.masked_fill(~seen, -math.inf)
        exact.append(
            (
                torch.einsum("hqk,khd->qhd", scores.softmax(-1), v),
                scores.logsumexp(-1).T / math.log(2),
            )
        )
    errors = [
        (found - true).norm() / true.norm()
        for found, true in zip((o, lse), map(torch.cat, zip(*exact, strict=True)), strict=True)
    ]
    return float(max(errors))


ERRORS = {"error_of_pages": error_of_pages, "error_of_parts": error_of_parts}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line of code, from 1
    language: str
    code: str
    marks: tuple[tuple[str, str], ...] = ()  # (mark, what follows its colon)
    before: Block | None = field(default=None, repr=False)  # on the page

    @property
    def mark(self) -> str | None:
        return self.marks[0][0] if self.marks else None

    @property
    def slow(self) -> bool:
        """Whether this block has that mark, or a block that it continues."""
        if self.before and self.mark == "continues the block before":
            return self.before.slow
        return self.mark == "slow"

    @property
    def module(self) -> str | None:
        """The path that the block is to be saved as."""
        found = re.match(r"# (\S+\.py)\n", self.code)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page.name}-{self.line}"


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    """The fenced blocks of a page. Raises ValueError, with the line, for what none may be."""
    lines, before = text.splitlines(), None
    marks: list[tuple[str, str]] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := re.fullmatch(r"<!-- ([^:]+?)(?:: (.*))? -->", line):
            if comment[1] in MARKS:
                marks.append((comment[1], comment[2] or ""))
            continue
        if not (fence := re.fullmatch(r"( *)(```+|~~~+) *(\w*)", line)):
            if marks:
                raise ValueError(f"{page}:{number}: {marks[-1][0]!r} stands above no code block")
            continue
        if fence[1] or not fence[3]:
            raise ValueError(f"{page}:{number}: a code block is not indented, and has a language")
        start = number
        while lines[number] != fence[2]:
            number += 1
        code = "".join(f"{line}\n" for line in lines[start:number])
        number += 1
        before = Block(page, start + 1, fence[3], code, tuple(marks), before)
        marks = []
        yield before


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]


def in_language(*languages: str) -> list[Block]:
    return [
        block
        for block in BLOCKS
        if block.language in languages and block.mark not in ("not run", "excerpt")
    ]


PYTHON = in_language("python")


def test_every_block_is_checked_or_says_why_not() -> None:
    for block in BLOCKS:
        assert block.language in ("python", "toml", "bash", "c", "text"), block
        assert block.language != "c" or block.mark in ("not run", "excerpt"), block
        assert len(block.marks) <= 1, block
        for mark, reason in block.marks:
            assert (mark == "continues the block before") == (not reason), block
    assert {block.page.name for block in PYTHON} >= {"README.md", "operators.md", "serving.md"}


# ---- Python


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a block, from which it can import; what blocks change is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)
    yield tmp_path
    cache.unfreeze()
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    monkeypatch.undo()
    arch_of_cache.forget()
    cute_attn.reload_settings()


def tiny_gemma3(folder: Path) -> str:
    """A model of that family with small random weights, where the example names a real one."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=256,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(folder / "gemma")
    return str(folder / "gemma")


def tiny_qwen3_next(folder: Path) -> str:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=256,
        layer_types=["full_attention"], mlp_only_layers=[0],
    )  # fmt: skip
    Qwen3NextForCausalLM(config).save_pretrained(folder / "qwen")
    return str(folder / "qwen")


DOWNLOADED: dict[str, Callable[[Path], str]] = {
    "google/gemma-3-1b-it": tiny_gemma3,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": tiny_qwen3_next,
}


def emulate(monkeypatch: pytest.MonkeyPatch, block: Block) -> None:
    """What README says: one variable, and another where the block asks which GPU there is."""
    monkeypatch.setenv("CUTE_ATTN_EMULATE", "1")
    if "current_arch()" in block.code:
        monkeypatch.setenv("CUTE_ATTN_ARCH", GPU_ARCH)
    arch_of_cache.forget()
    cute_attn.reload_settings()


def run(block: Block, folder: Path, device: str) -> dict[str, Any]:
    """The names that the block leaves. Its lines have their page's numbers in a traceback."""
    if block.mark == "continues the block before":
        assert block.before is not None
        names = run(block.before, folder, device)
    else:
        names = {"__name__": "__main__"}
        for other in BLOCKS:
            if other.page == block.page and other.line < block.line and other.module:
                save(other, folder)
    if block.module:
        save(block, folder)
        importlib.import_module(block.module.removesuffix(".py").replace("/", "."))
        return names
    code = block.code.replace('device="cuda"', f'device="{device}"')
    for name, make in DOWNLOADED.items():
        if name in code:
            code = code.replace(name, make(folder))
    source = folder / f"{block}.py"  # the compiler of kernels reads their source
    source.write_text("\n" * (block.line - 1) + code)
    exec(compile(source.read_text(), str(source), "exec"), names)
    return names


def save(block: Block, folder: Path) -> None:
    assert block.module is not None
    path = folder / block.module
    path.parent.mkdir(exist_ok=True)
    path.write_text(block.code)


def check_imports(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OPTIONAL:
            pytest.importorskip(node.module or "", exc_type=ImportError)


def check_results(block: Block, names: dict[str, Any]) -> None:
    """Every number is finite, and what is known of the results holds."""
    for name, value in names.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert bool(value.isfinite().all()), name
    for line, expected in RESULTS.items():
        if line in block.code:
            assert eval(expected, {**names, **ERRORS}), expected


CONTINUED = [b.before for b in PYTHON if b.mark == "continues the block before"]
# A block that another block continues is run with that block.
EMULATED = [b for b in PYTHON if b.mark != "needs a GPU" and b not in CONTINUED]


@pytest.mark.parametrize("block", [b for b in EMULATED if b.slow], ids=str)
def test_python_without_kernels(
    block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators check the arguments and choose kernels, and the kernels do nothing."""
    check_imports(block)
    emulate(monkeypatch, block)
    asked = []

    def function(_: Emulation, kernel: object, __: object) -> Callable[..., None]:
        asked.append(kernel)
        return lambda *_: None

    monkeypatch.setattr(Emulation, "function", function)
    run(block, folder, "cpu")
    assert asked


@pytest.mark.parametrize(
    "block", [pytest.param(b, marks=[pytest.mark.slow] * b.slow) for b in EMULATED], ids=str
)
def test_python_emulated(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_imports(block)
    emulate(monkeypatch, block)
    names = run(block, folder, "cpu")
    check_results(block, names)
    if "device=" in block.code or "emulator" in names:
        emulation = current_emulation()
        assert emulation is not None
        reports = [
            emulator.report
            for emulator in (emulation.emulator, *names.values())
            if isinstance(emulator, Emulator)
        ]
        assert any(report.launches for report in reports)
        assert not any(report.findings for report in reports)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [b for b in PYTHON if 'device="cuda"' in b.code], ids=str)
def test_python_on_a_gpu(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_imports(block)
    if cache.current_arch() != GPU_ARCH:
        pytest.skip(f"the examples are for {GPU_ARCH}")
    monkeypatch.delenv("CUTE_ATTN_EMULATE", raising=False)
    cute_attn.reload_settings()
    check_results(block, run(block, folder, "cuda"))
    torch.cuda.synchronize()


def test_the_emulators_example_without_its_barrier(folder: Path) -> None:
    """It has the findings that the page promises."""
    page = [b for b in PYTHON if b.page.name == "emulator.md"]
    (block,) = (b for b in page if "    cute.arch.sync_threads()\n" in b.code)
    broken = block.code.replace("    cute.arch.sync_threads()\n", "")
    with pytest.raises(FindingsError) as raised:
        run(Block(block.page, block.line, "python", broken), folder, "cpu")
    assert [f.check for f in raised.value.findings] == ["uninitialised", "race", "race"]


# ---- excerpts


def missing(block: Block) -> str | None:
    """The first line that the file does not have behind the lines before it."""
    file = ROOT / dict(block.marks)["excerpt"]
    lines = [line.strip() for line in file.read_text().splitlines()]
    at = 0
    for line in filter(None, map(str.strip, block.code.splitlines())):
        if line == "..." or line.startswith(("//", "# ")):
            continue
        if line not in lines[at:]:
            return line
        at = lines.index(line, at) + 1
    return None


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == "excerpt"], ids=str)
def test_excerpts_are_in_the_source(block: Block) -> None:
    assert missing(block) is None


# ---- spec files


@pytest.mark.parametrize("block", in_language("toml"), ids=str)
def test_spec_files(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "serving.toml"
    file.write_text(block.code)
    tables = tomllib.loads(block.code)
    for arch in ("sm_90a", "sm_100a"):
        only = [t.get("arch", arch) for kind in tables.values() for t in kind]
        if any(arch in archs for archs in only):
            assert cache.plan_file(file, arch)
        else:
            with pytest.raises(cache.CacheError, match=f"no kernel for {arch}"):
                cache.plan_file(file, arch)


# ---- shell


def commands(code: str) -> Iterator[list[str]]:
    """The words of each command, those within $(...) on their own too."""
    for line in code.replace("\\\n", " ").splitlines():
        for inner in re.findall(r"\$\((.*?)\)", line):
            yield shlex.split(inner)
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


def check_make(words: list[str]) -> None:
    subprocess.run(
        ["make", "-n", f"PYTHON={sys.executable}", *words],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def check_python(words: list[str]) -> None:
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file(), words[0]
        return
    module, *options = words[1:]
    options = options[: options.index(">")] if ">" in options else options
    parsers: dict[str, Callable[[], argparse.ArgumentParser]] = {
        "cute_attn": lambda: importlib.import_module("cute_attn.__main__")._parser(),
        "cute_attn.cache": lambda: importlib.import_module("cute_attn.cache.__main__")._parser(),
        "cute_attn.bench": lambda: importlib.import_module("cute_attn.bench.__main__").build_parser(
            options[0]
        ),
    }
    if module in parsers:
        if options == ["--version"]:  # ends the process
            return
        parsers[module]().parse_args(options)
        return
    found = importlib.util.find_spec(module)
    assert found is not None, module
    if found.submodule_search_locations:
        assert importlib.util.find_spec(f"{module}.__main__") is not None, module
    for word in options:
        assert "/" not in word or (ROOT / word).exists(), word


def check_pip(words: list[str]) -> None:
    """Extras and bounds are those of pyproject.toml."""
    assert words.pop(0) == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {Requirement(text).name: Requirement(text) for text in project["dependencies"]}
    compiler = known["nvidia-cutlass-dsl"].specifier
    for word in words:
        if word.startswith("--"):
            continue
        if word.startswith("."):
            assert set(re.findall(r"\w+", word)) <= set(extras), word
            continue
        wanted = Requirement(word)
        if wanted.name.startswith("nvidia-cutlass-dsl-libs"):  # of the compiler's version
            assert wanted.specifier == compiler, word
        else:
            assert wanted.specifier == known[wanted.name].specifier, word
            assert str(wanted.marker) == str(known[wanted.name].marker), word


def check_export(words: list[str]) -> None:
    documented = (ROOT / "docs/environment.md").read_text()
    for word in words:
        assert f"| `{word.partition('=')[0]}` |" in documented, word


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "python": check_python,
    "pip": check_pip,
    "export": check_export,
    "mkdir": lambda _: None,
    "cp": lambda _: None,
    ".venv/bin/pre-commit": lambda _: None,
    ".venv/bin/python": check_python,
}


@pytest.mark.parametrize("block", in_language("bash"), ids=str)
def test_commands(block: Block) -> None:
    found = list(commands(block.code))
    assert found
    for program, *words in found:
        PROGRAMS[program](words)


# ---- the checks themselves


def only_block(text: str) -> Block:
    (block,) = blocks_of(ROOT / "README.md", text)
    return block


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: a reason -->\nno block\n",
        "```\nwithout a language\n```\n",
        "- in a list\n\n  ```python\n  indented\n  ```\n",
    ],
)
def test_pages_that_hide_a_block_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"README.md:\d+: "):
        list(blocks_of(ROOT / "README.md", text))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print(never_defined)\n", NameError),
        ("from cute_attn import no_such_operator\n", ImportError),
    ],
)
def test_python_that_cannot_be_copied_fails(
    code: str, error: type[Exception], folder: Path
) -> None:
    with pytest.raises(error):
        run(only_block(f"```python\n{code}```\n"), folder, "cpu")


def test_results_that_are_not_finite_fail() -> None:
    block = only_block("```python\npass\n```\n")
    with pytest.raises(AssertionError, match="o"):
        check_results(block, {"o": torch.tensor([0.0, math.nan])})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("inverse = reciprocal(total)\nfor i in self.row_of_acc(row):\n", None),
        ("inverse = reciprocal(total)\n...\nacc[i] = acc[i] * inverse\n", None),
        ("for i in self.row_of_acc(row):\ninverse = reciprocal(total)\n", "inverse = "),
        ("acc[i] = acc[i] / total\n", "acc[i] = acc[i] / total"),
    ],
)
def test_excerpts_that_have_gone_stale_are_found(code: str, expected: str | None) -> None:
    mark = "<!-- excerpt: cute_attn/kernels/ladder/step4_full.py -->"
    found = missing(only_block(f"{mark}\n```python\n{code}```\n"))
    assert found is None if expected is None else found is not None and found.startswith(expected)


@pytest.mark.parametrize(
    "command",
    [
        "make no-such-target",
        "python examples/no_such_example.py",
        "python -m cute_attn.cache build serving.toml --arch sm_90a",
        "python -m cute_attn.bench no-such-benchmark",
        "python -m cute_attn.no_such_module",
        "python -m pytest tests/no_such_test.py",
        "pip install '.[no_such_extra]'",
        "pip install 'torch>=1.0'",
        "export CUTE_ATTN_NO_SUCH_VARIABLE=1",
        "no-such-program",
        'cp "$(python -m cute_attn.cache path --no-such-option)" .',
    ],
)
def test_commands_that_would_fail_are_found(command: str) -> None:
    with pytest.raises((AssertionError, KeyError, SystemExit, subprocess.CalledProcessError)):
        test_commands(only_block(f"```bash\n{command}\n```\n"))
