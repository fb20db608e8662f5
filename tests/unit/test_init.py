from __future__ import annotations

import importlib.metadata
import inspect
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import pytest

import blobstore
from blobstore.cli.main import _COMMANDS, program

ROOT = Path(__file__).parents[2]

# The public interface: change it here and in docs/reference/python.md together.
FUNCTIONS = """
check_archive(path, references, *, jobs, progress)
check_signatures(references, *, keys, store, on_error)
compare(reference, base, *, store, patterns, names, jobs, progress)
convert(source, target, *, subtree, strip_prefix, weights, keep_names, skip_unreadable, force, jobs, progress)
copy(source, target, *, store, force)
copy_to_store(source, to, target, *, store, force, jobs, progress)
create(source, reference, *, store, source_options, sha256, keep_hub_cache, experts, quantize, decode, as_is, paranoid, state, jobs, executor, dry_run, progress)
create_all(folder, name, *, store, prefix, dry_run, progress, options)
diff(ours, theirs, *, store, jobs, plain_http, progress)
du(references, *, store)
export(reference, folder, *, store, shard_size, single, dequantize, force, jobs, progress)
find(text, *, store, on_found)
follow(reference, source, *, store, interval, keep_last, once, streams, limit_rate, jobs, plain_http, stop, on_error, progress)
freeze(references, *, store, level, base, find_base, keep_hot, older_than, dry_run, jobs, progress)
gc(*, store, older_than, dry_run, force)
gc_remote(address, *, older_than, dry_run, force)
history(reference, *, store)
info(reference, *, store, plain_http)
ingest(items, target, *, executor, retries, on_done, options)
inspect(path, *, subtree)
link(reference, folder, *, store, hard, old_keys, force, jobs, progress)
list(references, *, store, read_sources, read_signatures, read_metrics, on_error)
load(reference, *, store, framework, device, verify)
lock(references, path, *, remote, store)
open(reference, *, store, framework, device, verify, dequantize, read, thaw, cache, cache_limit, plan, progress)
open_archive(path)
open_checkpoint(path, *, subtree)
pack(references, path, *, store, level, signatures, force, jobs, progress)
page(target, references, *, store, measure, jobs, progress)
pull(remote, name, *, store, prefix, streams, limit_rate, jobs, force, cold, dry_run, expected, plain_http, progress)
push(reference, remote, *, store, registry, cold, level, base, verify, dry_run, expected, streams, limit_rate, progress)
push_version(reference, folder, *, receiver, base, store, jobs, progress)
read_file(reference, name, *, store)
remove(references, *, keep_last, older_than, store, dry_run)
rename(source, target, *, store, force)
repair(references, source, *, store, overrides, weights, ignore_unindexed, subtree, strip_prefix, keep_names, skip_unreadable, keep, exclude, dry_run, plain_http, jobs, progress)
restore(reference, ident, *, store)
run(reference, arguments, *, store, server, timeout)
save(tensors, reference, *, model, files, metrics, store, background, jobs, progress)
show(reference, *, store, plain_http)
show_source(reference, *, store, plain_http)
sign(reference, key, *, store, out, layout, passphrase, force, jobs, progress)
start_server(*, store, host, port, allow, token_file, tls_cert, tls_key, anonymous, upstream, upstream_token_file, drain, log)
sync(models, *, store, check, replace_others, streams, limit_rate, jobs, plain_http, progress)
thaw(references, *, store, keep_cold, jobs, progress)
unpack(path, references, *, store, signatures, prefix, force, jobs, progress)
verify(references, *, store, quick, sample, rate, jobs, progress, on_error)
"""
TYPES = """
ArchiveReader BlobstoreError CheckedArchive Checkpoint Collected CollectedObjects Comparison Copied CopiedModel
Created CreatedModel Difference Exported Followed FormerModel FoundPlaces Frozen IngestedModel Inspection Linked
ListedModel LocalStore LockedModel Model ModelDescription ModelInfo ModelPlan Named Packed Page Pulled Pushed PushedVersion QuantizeOptions ReadPlan Reference
RegistryOptions RemovedModels Repaired RunningServer Signed SignedModel SourceOptions SourceRecord StoreLike StoreUsage SyncedModel Thawed Unpacked Verified
"""


def run(code: str) -> str:
    """Return what a fresh interpreter prints, started at the root of the project."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, text=True
    )
    return done.stdout


def signature(name: str) -> str:
    """Return a function with the names of its parameters; those after ``*`` are keywords."""
    parameters = list(inspect.signature(getattr(blobstore, name)).parameters.values())
    names = [parameter.name for parameter in parameters]
    keywords = [parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters]
    if any(keywords):
        names.insert(keywords.index(True), "*")
    return f"{name}({', '.join(names)})"


def test_the_public_interface_is_what_it_was() -> None:
    functions = [name for name in blobstore.__all__ if inspect.isfunction(getattr(blobstore, name))]

    assert sorted(map(signature, functions)) == FUNCTIONS.split("\n")[1:-1]
    assert sorted(set(blobstore.__all__) - set(functions)) == TYPES.split()


def test_the_documents_name_the_whole_public_interface() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")

    assert [name for name in blobstore.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_public_modules_need_no_import_of_their_own() -> None:
    assert run("import blobstore as b; print(b.errors.NotFound, b.safetensors.safe_open)")


def test_tells_its_version() -> None:
    assert blobstore.__version__ == version("tensor-blobstore")
    assert "__version__" in dir(blobstore)


def test_runs_from_its_sources_without_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.delitem(vars(blobstore), "__version__", raising=False)
    assert blobstore.__version__ == "0+unknown"
    monkeypatch.delitem(vars(blobstore), "__version__")


def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it() -> None:
    code = """
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
for name in ("torch", "mlx", "mlx.core", "mlx_lm", "transformers"):
    sys.modules[name] = None
import blobstore
with TemporaryDirectory() as folder:
    (Path(folder) / "notes.onnx").write_bytes(b"x")
    blobstore.create(folder, "m", store=f"{folder}/store", source_options=blobstore.SourceOptions(keep=("*.onnx",)))
    for framework in ("torch", "mlx"):
        try:
            blobstore.open("m", store=f"{folder}/store", framework=framework)
        except blobstore.BlobstoreError as error:
            print(error)
    for name in ("transformers", "mlx_lm"):
        try:
            import_module(f"blobstore.integrations.{name}").load_model
        except ImportError as error:
            print(error)
"""
    assert (
        run(code).splitlines()
        == [
            "torch is not installed for this Python; run: pip install 'tensor-blobstore[torch]'",
            "mlx is not installed for this Python; run: pip install 'tensor-blobstore[mlx]'",
        ]
        * 2
    )


# Commands by the functions that do the same.
COMMANDS = {name: name for name in blobstore.__all__} | {
    "copy": "cp",
    "remove": "rm",
    "rename": "mv",
}


@pytest.mark.parametrize("function", [name for name in COMMANDS if COMMANDS[name] in _COMMANDS])
def test_options_have_the_defaults_of_the_command_line(function: str) -> None:
    loaded = program.get_command(click.Context(program), COMMANDS[function])
    assert loaded is not None
    parameters = inspect.signature(getattr(blobstore, function)).parameters
    shared = [option for option in loaded.params if option.name in parameters]
    assert shared
    context = click.Context(loaded)
    for option in shared:
        given = option.to_info_dict().get("default")
        given = option.process_value(context, given) if given else None
        default = parameters[str(option.name)].default
        default = None if default is inspect.Parameter.empty else default
        assert (given or None) == (default or None), option.name


def test_help_shows_functions_under_their_public_names() -> None:
    names = [line.partition("(")[0] for line in FUNCTIONS.split("\n")[1:-1]]

    assert [getattr(blobstore, name).__name__ for name in names] == names


def test_importing_the_package_imports_only_the_list_of_what_draws_pictures() -> None:
    listing = "import sys, blobstore; print(*sorted(name for name in sys.modules if name.startswith('blobstore')))"
    assert run(listing).split() == ["blobstore", "blobstore.core", "blobstore.core.pictures"]


def test_a_public_name_imports_only_its_own_home() -> None:
    code = "import sys, blobstore; blobstore.BlobstoreError; print('blobstore.operations.open' in sys.modules)"
    assert run(code) == "False\n"


def test_public_names_stay_what_they_are_after_every_module_was_imported() -> None:
    code = """
import importlib, pkgutil, types
import blobstore
found = [module.name for module in pkgutil.walk_packages(blobstore.__path__, "blobstore.")]
for name in found:
    # vLLM has an environment of its own.
    if not name.endswith(("__main__", ".vllm.loader", ".vllm.server")):
        importlib.import_module(name)
names = {name: getattr(blobstore, name) for name in blobstore.__all__}
assert "blobstore.operations.create.create" in found
assert not [name for name, value in names.items() if isinstance(value, types.ModuleType)]
print(names["create"].__module__, names["open"].__name__, names["LocalStore"].__module__)
"""
    assert run(code) == "blobstore open blobstore.operations.open\n"


@pytest.mark.parametrize("name", blobstore.__all__)
def test_a_public_name_is_looked_up_once(name: str) -> None:
    first = getattr(blobstore, name)
    assert vars(blobstore)[name] is first
