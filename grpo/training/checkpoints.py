"""Checkpoints as folders of plain data. Reading one runs no code of it, and a damaged one is found by its checksums.

    NUMBER.ckpt/tensors.safetensors   all tensors of the run: weights, optimizer, generators
    NUMBER.ckpt/state.json            everything else
    NUMBER.ckpt/sha256.json           the SHA-256 of both

With strategy.checkpoint=sharded there are tensors.RANK.safetensors instead, each with some rows of every tensor.

A folder gets its name when it is complete and on the disk, so a crash leaves none that is half written.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.io import CheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo.runs.run import numbered
from grpo.system import distributed
from grpo.system.distributed import full, local
from grpo.system.errors import UserError, one_line, plural
from grpo.system.files import surviving
from grpo.system.loading import not_finite
from grpo.training.plain import Tensors, from_plain, to_plain

log = logging.getLogger(__name__)

TENSORS, STATE, SUMS = "tensors.safetensors", "state.json", "sha256.json"
WEIGHTS = "state_dict."  # the names of the policy's tensors begin with it

# The parts without which a run would begin anew, with later weights, by their dotted names.
PARTS = {
    "pytorch-lightning_version": str, "state_dict": dict, "optimizer_states": list, "lr_schedulers": list,
    "loops.fit_loop": dict, "callbacks.RolloutCallback.rollouts": int, "callbacks.RolloutCallback.random": dict,
    "callbacks.RolloutCallback.objects": dict,
}  # fmt: skip


class PlainCheckpoints(CheckpointIO):
    """Writes and reads the folders for Lightning."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Literal["whole", "pieces"] | None = None
    ) -> None:
        """Write a checkpoint, or log one line if the disk is full. Raises UserError if something in it is no plain data.

        storage_options: set if all ranks call this, with sharded tensors. whole: the first rank writes them all. pieces: each
        rank writes its rows of them, to a file of its own.
        """
        tensors, pieces = Tensors(), storage_options == "pieces"
        first = not storage_options or distributed.rank() == 0
        try:
            state = to_plain(checkpoint, tensors)
        except TypeError as error:
            raise UserError(f"a state_dict has no plain data: {error}") from error
        written = local_shards(tensors, pieces, first)
        if not first and not pieces:
            return
        path = Path(path)
        with surviving(str(path)), new_folder(path) if first else nullcontext(neighbour(path, "new")) as folder:
            sums = write_pieces(folder, written) if pieces else write_file(folder / TENSORS, written)
            if first:
                (folder / STATE).write_text(json.dumps(state))
                (folder / SUMS).write_text(json.dumps(sums | {STATE: sha256(folder / STATE)}))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None, lazily: bool = False
    ) -> dict[str, Any]:
        """Return a checkpoint, on the CPU.

        lazily: tensors in several files are RowsInFiles. Raises UserError for weights that are not finite.
        """
        path = Path(path)
        try:
            tensors = read_tensors(path, mapped=lazily)
        except SafetensorError as error:
            raise UserError(f"{path} has no tensors that can be read: {one_line(error, 200)}") from error
        weights = [(name, part) for name, parts in tensors.items() if name.startswith(WEIGHTS) for part in parts]
        broken = [name.removeprefix(WEIGHTS) for name in not_finite(weights)]
        joined = RowsInFiles if lazily else torch.cat
        whole = {name: parts[0] if len(parts) == 1 else joined(parts) for name, parts in tensors.items()}
        try:
            checkpoint = {**from_plain(json.loads((path / STATE).read_text()), whole)}
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} was written by another version: {error}") from error
        if distributed.rank() == 0 and not checkpoint.get("optimizer_states", True):
            log.warning("%s has no state of the optimizer, which begins anew: the run is not as without a stop", path)
        if broken:
            raise UserError(
                f"{path}: values of {plural(len(broken), 'weight')} are not finite, the first is {broken[0]}"
            )
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(path)


class RunCheckpoints(PlainCheckpoints):
    """The checkpoints that a run is resumed from."""

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a checkpoint. Raises UserError also if it lacks one of PARTS."""
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        for name, kind in PARTS.items():
            part = checkpoint
            for key in name.split("."):
                part = part.get(key) if isinstance(part, dict) else None
            if not isinstance(part, kind):
                raise UserError(f"{path} is no whole checkpoint of a run: {name} is missing in its {STATE}")
        return checkpoint


class RowsInFiles:
    """A tensor whose rows are in several files, in order; a slice reads its rows. parts: [rows, ...] each."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts, self.shape = parts, torch.Size((sum(map(len, parts)), *parts[0].shape[1:]))

    def __getitem__(self, rows: slice) -> Tensor:
        pieces, start = [], 0  # start: the first row of a part
        for part in self.parts:
            pieces.append(part[max(0, rows.start - start) : max(0, rows.stop - start)])
            start += len(part)
        return torch.cat(pieces)


def local_shards(tensors: Mapping[str, Tensor], pieces: bool, first: bool) -> dict[str, Tensor]:
    """Return the tensors that this rank writes: with `pieces` its rows of the sharded ones, else the first rank writes all."""
    shards = {}
    for name, tensor in tensors.items():
        sharded = local(tensor) is not tensor
        shard = local(tensor) if pieces else full(tensor)  # one at a time
        if first or (pieces and sharded):
            shards[name] = shard.cpu().contiguous()
    return shards


def write_file(file: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write tensors to a file. Returns the file's SHA-256 by its name."""
    save_file(tensors, file)
    return {file.name: sha256(file)}


def write_pieces(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write this rank's tensors to a file of its own. Returns the SHA-256 of all ranks' files. Raises OSError on all ranks if the
    disk of one is full."""
    distributed.all_gather([None])  # from now on the folder is there
    try:
        file = folder / f"tensors.{distributed.rank():05}.safetensors"
        sums, fault = write_file(file, tensors), None
    except (OSError, SafetensorError) as error:
        sums, fault = {}, error
    everyones = distributed.all_gather([sums])
    if not all(everyones):
        raise fault or OSError(errno.ENOSPC, "another device could not write its part")
    return {name: digest for of_rank in everyones for name, digest in of_rank.items()}


def read_tensors(folder: Path, mapped: bool) -> dict[str, list[Tensor]]:
    """Return the tensors of a checkpoint by name, each as its parts.

    mapped: the files are mapped, not read. A tensor of the optimizer that stayed mapped would keep the whole file in memory, next
    to the pages that have changed since, and on the disk when it is removed.
    """
    parts: dict[str, list[Tensor]] = {}
    for file in sorted(folder.glob("tensors*.safetensors")):
        for name, tensor in load_file(file, backend="mmap" if mapped else "pread").items():
            parts.setdefault(name, []).append(tensor)
    return parts


def neighbour(folder: Path, word: str) -> Path:
    """Return the path of a folder's version that is written, or was replaced."""
    return folder.with_name(f"{folder.name}.{word}")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to. After the block its files are on the disk and it is `folder`, whatever that was before;
    if the block raises, `folder` stays as it was."""
    new, old = neighbour(folder, "new"), neighbour(folder, "old")
    for left in (new, old):  # by a crash
        shutil.rmtree(left, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        yield new
        # before the name: after a power cut a folder could have its name, and files that never reached the disk
        for path in [*new.iterdir(), new]:
            to_disk(path)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        to_disk(folder.parent)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link(name: Path, folder: Path) -> None:
    """Let `name` be a link to a folder beside it, in one move."""
    new = name.with_name(f"{name.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(folder.name)
    new.replace(name)


def by_rollouts(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by the number of rollouts, the newest first."""
    return dict(reversed(numbered(folder, ".ckpt").items()))


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fault_of(folder: Path) -> str | None:
    """Return why a checkpoint cannot be used, in words; None if it is whole."""
    try:
        sums = json.loads((folder / SUMS).read_text())
        changed = [name for name in {STATE: "", **sums} if sha256(folder / name) != sums[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it is incomplete ({type(error).__name__}: {one_line(error, 200)})"
    return f"{' and '.join(changed)} changed after it was written" if changed else None


def usable(path: Path) -> Path:
    """Return the checkpoint to resume from: `path`, or the newest one if that is the folder of a run or its last.ckpt.

    If the newest is damaged, a warning says so, and the one before is taken.
    Raises UserError if no checkpoint can be used.
    """
    if path.is_file():
        raise UserError(f"ckpt_path={path} is a file: give a run's folder, or one of its checkpoints, NUMBER.ckpt")
    runs = {path / "checkpoints", path.parent} if path.name == "last.ckpt" else {path / "checkpoints"}
    newest = [checkpoint for folder in runs for checkpoint in by_rollouts(folder).values()]
    for checkpoint in newest or [path]:
        if (fault := fault_of(checkpoint)) is None:
            return checkpoint
        log.warning("checkpoint %s is damaged: %s", checkpoint, fault)
    others = [checkpoint for checkpoint in by_rollouts(path.parent).values() if checkpoint != path]
    advice = "give the folder of a run with whole checkpoints"
    if others and not newest:
        advice = f"there is also {others[0]}"
    raise UserError(f"ckpt_path={path} is no whole checkpoint: {advice}")


def check_shapes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise UserError if the shapes of a checkpoint's tensors, by name, are not those of the policy."""
    if different := [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]:
        saved, present = (shapes.get(different[0], "missing") for shapes in (theirs, ours))
        raise UserError(
            f"ckpt_path is a checkpoint of another model: {len(different)} of {len(ours)} tensors differ, the first is "
            f"{different[0]} ({saved} there, {present} here); give the model=, adapter= and critic= of that run"
        )
