"""Each recipe of docs/hardware.md fits the GPU that it is for, with each engine that engine=auto may take: by the forecast."""

import re

import pytest
from helpers.recipes import GB, cell, chosen, names_engine, peaks, recipes


@pytest.mark.slow
@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: " ".join(recipe.command))
def test_a_recipe_fits_its_gpu_as_the_table_says(recipe, vllm):
    """A plan leaves 3 % of the card. The numbers of the table are those of the forecast, to 0.2 GB."""
    if vllm and names_engine(recipe):
        assert recipe.cells[vllm] == "-"
        pytest.skip("the recipe names the engine")
    found = chosen(recipe, vllm)
    needed = {phase: size / GB for phase, size in peaks(found.parts).items()}
    assert max(needed.values()) <= 0.97 * recipe.size + 1e-6 and not found.lacks, needed
    now, written = (re.fullmatch(r"([\d.]+), ([\d.]+)(.*)", text) for text in (cell(recipe, vllm), recipe.cells[vllm]))
    assert now[3] == written[3]
    assert [float(now[i]) for i in (1, 2)] == pytest.approx([float(written[i]) for i in (1, 2)], abs=0.2)
