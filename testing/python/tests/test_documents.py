"""Examples in docstrings and documents, and the notebook."""

import doctest
import importlib
import json
import os
import pathlib
import pkgutil
import unittest

import dacapo

from .models import ROOT


def load_tests(loader, tests, pattern):
    for module in pkgutil.iter_modules(dacapo.__path__, "dacapo."):
        if module.name not in ("dacapo.__main__", "dacapo._dacapo"):
            tests.addTests(doctest.DocTestSuite(importlib.import_module(module.name)))
    tests.addTests(doctest.DocTestSuite(dacapo))
    # Relative to this file, because doctest takes no other path.
    here = pathlib.Path(__file__).parent
    guide = os.path.relpath(ROOT / "docs/PYTHON.md", here)
    tests.addTests(doctest.DocFileSuite(guide))
    return tests


class Notebook(unittest.TestCase):
    def test_every_cell_runs(self):
        """Runs the cells in order in one namespace; what a cell shows must be there."""
        notebook = json.loads((ROOT / "examples/notebook.ipynb").read_text())
        names = {"__name__": "__main__"}
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        self.assertGreaterEqual(len(code), 8)
        for number, cell in enumerate(code, 1):
            self.assertEqual(cell["outputs"], [], "outputs are not stored")
            source = "".join(cell["source"])
            with self.subTest(cell=number):
                exec(compile(source, f"cell {number}", "exec"), names)
        names["llm"].close()

    def test_types_are_part_of_the_package(self):
        folder = pathlib.Path(dacapo.__file__).parent
        self.assertTrue((folder / "py.typed").exists() and (folder / "_dacapo.pyi").exists())
