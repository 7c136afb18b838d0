"""Faults in how files and folders become whole."""

from scripts.mutants.mutant import Mutant, tests

FILES, FILE = "files.py", "files/test_files.py"

MUTANTS = (
    Mutant(
        "a file is written in place",
        FILES,
        "        os.replace(partial, path)\n",
        "        path.write_bytes(partial.read_bytes())\n        os.replace(partial, path)\n",
        tests(FILE, "test_a_name_that_cannot_be_given_leaves_the_old_file_alone"),
    ),
    Mutant(
        "what failed to be written stays",
        FILES,
        "        partial.unlink(missing_ok=True)\n        raise",
        "        raise",
        tests(FILE, "test_a_block_that_raises_leaves_the_old_file_alone"),
    ),
    Mutant(
        "a file gets its name before it is on the disk",
        FILES,
        "            os.fsync(file.fileno())\n        os.replace(partial, path)\n",
        "            pass\n        os.replace(partial, path)\n",
        tests(FILE, "test_all_is_on_the_disk_before_it_gets_its_name"),
    ),
    Mutant(
        "a name is not put on the disk",
        FILES,
        "    _settle(path.parent)\n\n\n@contextmanager\ndef new_folder",
        "\n\n@contextmanager\ndef new_folder",
        tests(FILE, "test_all_is_on_the_disk_before_it_gets_its_name"),
    ),
    Mutant(
        "a folder that failed stays",
        FILES,
        "        shutil.rmtree(partial, ignore_errors=True)\n        raise",
        "        raise",
        tests(FILE, "test_a_folder_that_fails_is_removed_and_one_that_exists_refused"),
    ),
)
