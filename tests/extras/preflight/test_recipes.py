"""Each recipe of docs/hardware.md fits the GPU that it is for, with each engine that engine=auto may take: by the forecast."""

import pytest
from helpers.recipes import GB, names_engine, parts_of, peaks, recipes


@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: " ".join(recipe.command))
def test_a_recipe_fits_its_gpu(recipe, vllm):
    if vllm and names_engine(recipe):
        pytest.skip("the recipe names the engine")
    parts, again, lacks = parts_of(recipe, vllm)
    needed = {phase: round(size / GB, 1) for phase, size in peaks(parts).items()}
    assert max(needed.values()) <= recipe.size and not lacks, (needed, again)
