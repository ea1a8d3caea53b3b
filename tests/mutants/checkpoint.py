"""Of the room ``checkpoint``, but for ``atomic``."""

from tests.mutants.mutant import Mutant

_DAMAGE, _PICKLES = "checkpoint/test_damage.py", "checkpoint/test_pickles.py"
_UNSEEN = (f"{_DAMAGE}::test_no_damage_goes_unseen",)
_RUNS = (f"{_PICKLES}::test_no_code_of_a_checkpoint_runs",)
_OTHER_PART = (f"{_DAMAGE}::test_a_file_of_another_checkpoint_is_no_part_of_this_one",)
_REPLACED = (f"{_DAMAGE}::test_a_checkpoint_that_another_run_replaces_meanwhile_is_refused",)
_CUT = (f"{_DAMAGE}::test_a_cut_part_is_seen_without_reading_it",)

MUTANTS = [
    Mutant(
        "checkpoint/converting.py",
        '        return first.pop() if of_trainer and len(first) == 1 else ""\n',
        '        return ""\n',
        ("checkpoint/test_pretrained_folders.py::test_the_loaded_model_is_the_trained_one",),
        "from_pretrained finds no weight of a converted checkpoint, and draws all of them",
    ),
    Mutant(
        "checkpoint/folders.py",
        "            self._checksums.check_value(self._where, read_item.dest_index.fqn, tensor)\n",
        "            pass\n",
        _OTHER_PART,
        "tensors of a folder are not compared with their checksums",
    ),
    Mutant(
        "checkpoint/folders.py",
        "            self._checksums.check_value(self._where, key, value.getbuffer())\n",
        "            pass\n",
        (f"{_DAMAGE}::test_a_value_of_another_checkpoint_is_none_of_this_one",),
        "values of a folder that are no tensors are not compared with their checksums",
    ),
    Mutant(
        "checkpoint/folders.py",
        "                self.checksums.check_file(self.location.text, path)\n",
        "                pass\n",
        _OTHER_PART,
        "a folder's files beside the values are not compared with their checksums",
    ),
    Mutant(
        "checkpoint/folders.py",
        "            if self.checksums is None:\n                self._check_archives(wanted.keys())\n",
        "",
        (f"{_DAMAGE}::test_damage_in_a_folder_of_others_is_told",),
        "folders of FSDP are not compared with the checksums in them",
    ),
    Mutant(
        "checkpoint/folders.py",
        "if Path(item.file).name != item.file]",
        "if False]",
        (f"{_PICKLES}::test_a_folder_reads_no_file_outside_of_it",),
        "a folder's metadata may name any file of the machine",
    ),
    Mutant(
        "checkpoint/folders.py",
        "metadata = unpickled_metadata(path.read_bytes())",
        "metadata = pickle.loads(path.read_bytes())",
        _RUNS,
        "a folder's metadata are unpickled whatever they name",
    ),
    Mutant(
        "checkpoint/folders.py",
        'wanted[key] = unpickled(value, f"{where}: {key}", self.reading)',
        "wanted[key] = torch.load(value, weights_only=False)",
        _RUNS,
        "values of a folder are unpickled whatever they name",
    ),
    Mutant(
        "checkpoint/folders.py",
        "            elif found < num_bytes:\n",
        "            elif found < 0:\n",
        _CUT,
        "a cut part of a folder is said to be complete",
    ),
    Mutant(
        "checkpoint/folders.py",
        "max(needed.get(item.file, 0), item.offset + item.num_bytes)",
        "max(needed.get(item.file, 0), item.offset)",
        _CUT,
        "the last value of a part may be cut",
    ),
    Mutant(
        "checkpoint/folders.py",
        "            except pickle.UnpicklingError as error:",
        "            except ZeroDivisionError as error:",
        (f"{_DAMAGE}::test_a_broken_tensor_of_a_folder_holds_no_code",),
        "a broken tensor is said to hold code that could be trusted",
    ),
    Mutant(
        "checkpoint/stage_state.py",
        "    if folder.checksums is None and entry_of(rest).get(_CHECKSUMS):\n",
        "    if False:\n",
        (f"{_DAMAGE}::test_a_folder_without_one_of_its_files_is_not_complete",),
        "a folder that has lost its checksums is read without them",
    ),
    Mutant(
        "checkpoint/checksums.py",
        "            if not _is_tensor(record.filename) or is_checked(number):\n",
        "            if not _is_tensor(record.filename):\n",
        _UNSEEN,
        "the tensors of a single file are not compared with their checksums",
    ),
    Mutant(
        "checkpoint/checksums.py",
        "    if written != found:\n",
        "    if written is not None and written != found:\n",
        (f"{_DAMAGE}::test_a_value_without_a_checksum_is_none_of_the_folder",),
        "a value that has no checksum is taken for whole",
    ),
    Mutant(
        "checkpoint/checksums.py",
        "found = zlib.crc32(chunk, found)",
        "found = zlib.crc32(chunk)",
        (f"{_DAMAGE}::test_a_large_file_has_the_checksum_of_all_of_it",),
        "only the end of a large file is compared",
    ),
    Mutant(
        "checkpoint/pickles.py",
        "            check_archive(file, where, reading.is_checked)\n",
        "",
        _UNSEEN,
        "single files are not compared with the checksums in them",
    ),
    Mutant(
        "checkpoint/pickles.py",
        "            _refuse_program(file, where)\n",
        "",
        (f"{_PICKLES}::test_a_program_is_no_checkpoint",),
        "TorchScript is loaded as a checkpoint",
    ),
    Mutant(
        "checkpoint/pickles.py",
        "(False, NamesOnly) if reading.names_only",
        "(False, None) if reading.names_only",
        _RUNS,
        "looking at a checkpoint runs its code",
    ),
    Mutant(
        "checkpoint/damage.py",
        "        if names_a_class(error):\n            raise\n",
        "        raise\n",
        (f"{_DAMAGE}::test_a_class_that_is_not_known_is_torchs_error_and_a_broken_pickle_is_not",),
        "a broken file is said to hold code that could be trusted",
    ),
    Mutant(
        "checkpoint/damage.py",
        "    except (FxPipeError, PermissionError, ConnectionError, TimeoutError):\n",
        "    except (FxPipeError, ConnectionError, TimeoutError):\n",
        (f"{_DAMAGE}::test_what_is_no_damage_stays_what_it_is",),
        "a file that may not be read is said to be damaged",
    ),
    Mutant(
        "checkpoint/safetensors_files.py",
        "                if checksums is not None:\n",
        "                if False:\n",
        _UNSEEN,
        "safetensors files are not compared with their checksums",
    ),
    Mutant(
        "strategy/checkpoint_hooks.py",
        "        if version_of(source.location) != source.version:\n            raise replaced\n",
        "",
        _REPLACED,
        "a checkpoint that is replaced while it is read is taken for one",
    ),
    Mutant(
        "strategy/checkpoint_hooks.py",
        "            self._check_version(source)\n",
        "",
        _REPLACED,
        "optimizers may be restored from another checkpoint than the weights",
    ),
    Mutant(
        "planner/plan.py",
        "        if complaint is not None:\n            raise _damaged(where, complaint)\n",
        "",
        ("planner/test_plan.py::test_plan_with_an_impossible_stage_is_damaged",),
        "a plan with impossible stages is followed",
    ),
]
