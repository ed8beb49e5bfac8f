"""The rules of the house (docs/ARCHITECTURE.md): who imports whom, what loads what, size, types, package, documents."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "fp4ward"


# --- imports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What a room may import: rooms or files of this package, and libraries beside the standard one."""

    package: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


EVERYTHING = Rule(("*",))
# The longest name that fits a module counts. What planning needs (config, facts, formats.formats, formats.scheme,
# parallel.placement, checkpoint.index) and what decides without computing (runtime.scheduler) is free of torch.
RULES = {
    "__init__": Rule(("llm", "runtime.request")),
    "__main__": Rule(("cli",)),
    "cli": EVERYTHING,
    "flags": Rule(("__init__", "config")),
    "environment": Rule(("__init__",), ("torch",)),
    "errors": Rule(),
    "config": Rule(),
    "hardware": Rule(),
    "memory": Rule(("config", "facts", "hardware", "kernels.specs", "pieces")),
    "pieces": Rule(
        ("facts", "kernels.specs", "checkpoint.assign", "checkpoint.index", "formats.formats", "formats.scheme")
        + ("parallel.placement",)
    ),
    "plan": Rule(("config", "memory", "pieces", "hardware", "kernels.specs", "formats.scheme", "parallel.placement")),
    "plan_text": Rule(("plan", "pieces", "hardware", "kernels.specs")),
    "llm": Rule(
        ("config", "checkpoint", "facts", "formats", "hardware", "models", "pieces", "plan", "runtime")
        + ("serve.template", "serve.text"),
        ("torch",),
    ),
    "facts": Rule(("facts", "formats.formats", "parallel.placement")),
    "formats": Rule(("formats",), ("torch",)),
    "formats.formats": Rule(),
    "formats.scheme": Rule(("formats.formats",)),
    "parallel": Rule(("parallel",), ("torch",)),
    "parallel.placement": Rule(),
    "parallel.typed": Rule(("facts", "formats", "layers.step", "parallel", "pieces"), ("torch", "spmd_types")),
    "checkpoint": Rule(("checkpoint", "formats", "parallel"), ("torch", "huggingface_hub", "rich")),
    "checkpoint.index": Rule(("formats.formats", "formats.scheme")),
    "checkpoint.assign": Rule(("checkpoint.index", "formats.formats", "formats.scheme", "parallel.placement")),
    "kernels": Rule(("kernels", "formats"), ("torch",)),
    "kernels.triton_linear": Rule(("kernels", "formats"), ("torch", "triton")),
    "kernels.triton_experts": Rule(("kernels", "formats"), ("torch", "triton")),
    "kernels.specs": Rule(("formats.formats", "hardware")),
    "layers": Rule(("layers", "kernels", "formats", "parallel"), ("torch",)),
    "models": Rule(
        ("models", "layers", "facts", "parallel.collectives", "parallel.placement", "formats.weight"), ("torch",)
    ),
    "runtime": Rule(
        ("runtime", "config", "memory", "plan", "checkpoint", "facts", "formats", "kernels", "layers", "models")
        + ("parallel",),
        ("torch",),
    ),
    "runtime.pool": Rule(),
    "runtime.request": Rule(),
    "runtime.scheduler": Rule(("runtime.pool", "runtime.request")),
    "serve": Rule(("serve", "runtime"), ("tokenizers", "jinja2")),
    "evals": Rule(("evals", "llm", "runtime.request"), ("rich", "matplotlib")),
    "evals.tasks": Rule(),
    "evals.stats": Rule(),
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """'formats.fp8' for formats/fp8.py, 'formats' for its __init__.py, '__init__' for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


MODULES = {module_name(p): p for p in sources()}


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def rule_of(module: str) -> Rule | None:
    rooms = [room for room in RULES if within(module, room)]
    return RULES[max(rooms, key=len)] if rooms else None


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of each import, inside functions and `if TYPE_CHECKING` too; relative ones are refused."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write the full name"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix("fp4ward.")
                is_module = base.split(".")[0] == "fp4ward" and inner in MODULES
                found.append((node.lineno, f"fp4ward.{inner}" if is_module else base))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found += [(node.lineno, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant)]
    return found


def forbidden_imports(module: str, path: Path) -> list[str]:
    rule = rule_of(module)
    if rule is None:
        return [f"{module}: belongs to no room; give it a row in RULES"]
    faults = []
    for line, name in imports(path):
        head, _, rest = name.partition(".")
        if head == "fp4ward":
            target = rest or "__init__"
            allowed = ("errors", *rule.package)
            if "*" not in allowed and not any(within(target, room) for room in allowed):
                faults.append(f"{path.relative_to(REPO)}:{line}: imports fp4ward.{target}, allowed are {allowed}")
        elif head not in sys.stdlib_module_names and head not in rule.libraries:
            faults.append(f"{path.relative_to(REPO)}:{line}: imports {head}, allowed are {rule.libraries or 'none'}")
    return faults


def test_every_module_imports_only_what_its_room_may() -> None:
    faults = [fault for module, path in MODULES.items() for fault in forbidden_imports(module, path)]
    assert not faults, "\n".join(faults)


def test_every_rule_has_a_room() -> None:
    assert [room for room in RULES if not any(within(m, room) for m in MODULES)] == []


@pytest.mark.parametrize(
    ("room", "source", "fault"),
    [
        ("formats.formats", "import torch", "imports torch"),
        ("kernels.x", "def f():\n    from fp4ward import models", "imports fp4ward.models"),
        ("kernels.x", "from fp4ward.models.qwen3_5 import Model", "imports fp4ward.models.qwen3_5"),
        ("facts.x", "from fp4ward.formats import weight", "imports fp4ward.formats.weight"),
        ("config", "import importlib\nimportlib.import_module('numpy')", "imports numpy"),
        ("nowhere.x", "", "belongs to no room"),
    ],
)
def test_the_import_check_sees(tmp_path: Path, room: str, source: str, fault: str) -> None:
    file = tmp_path / "x.py"
    file.write_text(source)
    global REPO
    repo, REPO = REPO, tmp_path
    try:
        assert fault in "".join(forbidden_imports(room, file))
    finally:
        REPO = repo


FREE_OF_TORCH = sorted(
    m
    for m in MODULES
    if m in ("__init__", "cli", "flags", "config", "errors", "environment", "runtime.request", "runtime.scheduler")
    or m in ("formats.formats", "formats.scheme", "parallel.placement", "checkpoint.index", "checkpoint.hub")
    or m in ("hardware", "memory", "pieces", "plan", "plan_text", "kernels.specs", "checkpoint.assign")
    or within(m, "facts")
)


@pytest.mark.parametrize("module", FREE_OF_TORCH)
def test_importing_it_loads_neither_torch_nor_triton_nor_numpy(module: str) -> None:
    name = "fp4ward" if module == "__init__" else f"fp4ward.{module}"
    code = f"import sys, {name}; print(sorted({{'torch', 'triton', 'numpy', 'cuda'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stdout + done.stderr


def test_the_public_names_come_on_first_use() -> None:
    import fp4ward

    assert dir(fp4ward) == ["LLM", "SamplingParams", "__version__"]
    assert fp4ward.SamplingParams is importlib.import_module("fp4ward.runtime.request").SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fp4ward.nothing  # noqa: B018


# --- what the code may not do -----------------------------------------------------------------------------------------


def test_only_the_command_line_reads_arguments_and_environment() -> None:
    faults = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "sys.argv"):
                faults.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert [f for f in faults if not f.startswith("cli:")] == []


def test_nothing_from_a_checkpoint_is_run() -> None:
    """safetensors, JSON and sandboxed templates only: no pickle, no eval, no remote code."""
    banned = {"eval", "exec", "compile", "torch.load", "pickle.load", "pickle.loads"}
    faults = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in banned:
                faults.append(f"{module}:{node.lineno}: {ast.unparse(node.func)}")
        assert "trust_remote_code" not in path.read_text(), f"{module}: there is no remote code to trust"
    assert faults == []


# --- size -------------------------------------------------------------------------------------------------------------

PACKAGE_LINES = 12_500  # of the engine; evals/ is a tool that uses it. Raised only with a reason in docs/LOG.md
FILE_LINES = 500
LONG_FILES = {"cli.py": "one short function a command, and nothing else may read the command line"}  # path -> reason


def test_the_package_stays_small() -> None:
    lines = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in sources()}
    assert sum(n for name, n in lines.items() if not name.startswith("evals/")) <= PACKAGE_LINES
    too_long = {name: n for name, n in lines.items() if n > FILE_LINES}
    assert sorted(too_long) == sorted(LONG_FILES), f"over {FILE_LINES} lines: {too_long}; with a reason: {LONG_FILES}"


# --- types and packaging ----------------------------------------------------------------------------------------------


def test_types_check() -> None:
    pytest.importorskip("mypy")
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_whole_package_and_the_licence(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("fp4ward-0.1.0-*.whl")
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        metadata = z.read("fp4ward-0.1.0.dist-info/METADATA").decode()
    want = {str(p.relative_to(REPO)) for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert "fp4ward/py.typed" in want
    assert want == {n for n in names if not n.startswith("fp4ward-")}
    assert "fp4ward-0.1.0.dist-info/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_every_dependency_is_used_and_every_import_is_a_dependency() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(d for extra in ("plot", "check") for d in project["optional-dependencies"][extra]),
    ]
    declared = {re.split(r"[>=<\[]", d)[0].replace("-", "_") for d in wanted}
    used = {name.split(".")[0] for p in sources() for _, name in imports(p)}
    used.remove("triton")  # comes with every torch that can use it, in the one version that torch wants
    used.add("numpy")  # behind Tensor.numpy(), which the loader reads files through; torch does not require it
    assert used - set(sys.stdlib_module_names) - {"fp4ward"} == declared


def test_the_tested_versions_cover_the_dependencies() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (REPO / "constraints.txt").read_text(), re.M))
    pinned = {name.lower().replace("_", "-") for name in pins}
    assert {re.split(r"[>=<\[]", d)[0] for d in wanted} <= pinned


# --- documents --------------------------------------------------------------------------------------------------------

DOCUMENTS = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def code_of(document: Path) -> str:
    """The fenced blocks and `code` of a document: what it says can be typed."""
    text = document.read_text()
    blocks = re.findall(r"```.*?\n(.*?)```", text, re.S)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_what_documents_say_to_type_exists(document: Path) -> None:
    from fp4ward.flags import parser

    code = code_of(document)
    targets = set(re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([a-z]+)", code, re.M)) <= targets
    (commands,) = (a.choices for a in parser()._actions if a.dest == "command")
    assert commands is not None
    for name, rest in re.findall(r"^(?:\$ )?(?:\.venv/bin/)?fp4ward ([a-z]+)(.*)", code, re.M):
        assert name in commands, f"{document.name}: fp4ward {name}"
        flags = set(re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", rest))
        assert flags <= set(commands[name]._option_string_actions), f"{document.name}: fp4ward {name}{rest}"


def test_the_readme_names_every_command() -> None:
    from fp4ward.flags import parser

    (commands,) = (a.choices for a in parser()._actions if a.dest == "command")
    assert set(commands or ()) <= set(re.findall(r"\bfp4ward ([a-z]+)", code_of(REPO / "README.md")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_numbers_that_tests_cite_are_explained() -> None:
    """`# B19`, `# F17`; F32 and F64 are types."""
    cited = set()
    for path in (REPO / "tests").rglob("*.py"):
        comments = re.findall(r"# (.*)", path.read_text())
        cited |= {number for text in comments for number in re.findall(r"\b[BF][1-9][0-9]?\b", text)}
    explained = re.findall(r"^\| ([BF]\d+) \|", (REPO / "docs" / "CITED.md").read_text(), re.M)
    assert sorted(explained) == sorted(cited - {"F32", "F64"})


def test_the_support_table_lists_what_the_code_knows() -> None:
    from fp4ward.facts import ARCHITECTURES, has_forward
    from fp4ward.formats.formats import FORMATS

    runs = {name for name in ARCHITECTURES if has_forward({"architectures": [name]})}
    text = (REPO / "README.md").read_text()
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    named = {name: row for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    supported = {name for name, row in named.items() if row[-1].startswith("yes")}
    assert supported >= {*runs, *FORMATS}
    classes = {name for name in named if re.fullmatch(r"\w+For\w+", name)}
    assert classes == set(ARCHITECTURES), "an architecture that the code does not know"
    assert classes & supported == runs


def test_every_fixture_is_whole() -> None:
    for folder in sorted((REPO / "tests" / "fixtures").iterdir()):
        assert {"config.json", "model.safetensors", "reference.safetensors"} <= {p.name for p in folder.iterdir()}
        json.loads((folder / "config.json").read_text())


# Written so that this file does not match itself.
FOREIGN = [
    r"[/]work/", r"[/]tmp/env", r"\bpypi[.]org", r"pythonhosted[.]", r"download[.]pytorch", r"npmjs[.]",
    r"debian[.]org", r"\b(this|the|a|another) [s]ession\b", r"\bwork[p]lace\b", r"\bcoordina[t]or\b",
    r"\b(CONTRACT|DESIGN|FORMATS|STYLE|ANCHORS)[.]md", r"\b(this|next|an earlier|a later) [i]ssue\b",
]  # fmt: skip


DICTIONARY = "fp4ward/evals/facts.json"  # its words are a dictionary's


def test_the_project_speaks_of_itself_only() -> None:
    """No paths of a machine it was written on, no package hosts, no talk of how it was made."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    ).stdout.split("\n")
    names = [n for n in listed if n and not n.startswith(("tests/fixtures/", "LICENSE", DICTIONARY))]
    if not names:
        pytest.skip("no git checkout")
    found = []
    for name in names:
        path = REPO / name
        if not path.is_file() or path.stat().st_size > 2_000_000:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for pattern in FOREIGN:
            found += [f"{name}: {m[0]}" for m in re.finditer(pattern, text, re.I)]
    assert found == []
