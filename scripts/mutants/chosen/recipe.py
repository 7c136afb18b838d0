"""Faults in the recipe: weights, memories, solvers, the loop, and the brute force that doubts it."""

from scripts.mutants.mutant import Mutant, tests

WEIGHTS, SOLVER, MEMORY = "recipe/weights.py", "recipe/solver.py", "recipe/memory.py"
OBJECTIVE, RECIPE, BRUTE = "recipe/objective.py", "recipe/recipe.py", "recipe/brute_force.py"
GRADIENTS = "algebra/conjugate_gradients.py"
CLOSED = ("tests/recipe/test_closed_forms.py",)
TWICE = ("tests/recipe/test_recipe.py::test_the_loop_can_be_differentiated_twice",)


def closed(names: str) -> tuple[str, ...]:
    """Return some tests against closed forms."""
    return tests("recipe/test_closed_forms.py", names)


OPTIMUM = ("tests/recipe/test_recipe.py::test_the_loop_reaches_the_optimum_that_brute_force_finds",)
CG = ("tests/recipe/test_conjugate_gradients.py",)

MUTANTS = (
    Mutant(
        "the decay has the wrong sign",
        WEIGHTS,
        "return tuple(_exp(along(self.g, p)) * p for p in parameters)",
        "return tuple(p / _exp(along(self.g, p)) for p in parameters)",
        CLOSED,
    ),
    Mutant(
        "a scalar decay does not fade",
        WEIGHTS,
        "return tuple(_exp(along(self.g, p)) * p for p in parameters)",
        "return parameters",
        CLOSED,
    ),
    Mutant(
        "the new pair is faded as well",
        WEIGHTS,
        "            past = past._replace(log_weights=past.log_weights + along",
        "            past = super().remember(past, k, v)\n"
        "            return past._replace(log_weights=past.log_weights + along",
        OPTIMUM,
    ),
    Mutant(
        "a channel decay fades the values' channels",
        WEIGHTS,
        "self.g.to(state.dtype).unsqueeze(-1)",
        "self.g.to(state.dtype).mean(-1, keepdim=True).unsqueeze(-1)",
        CLOSED,
    ),
    Mutant("a window keeps one pair more", WEIGHTS, "part[:, :, -self.size :]", "part[:, :, -self.size - 1 :]", CLOSED),
    Mutant("a window by brute force is one pair short", WEIGHTS, "age < self.size", "age < self.size - 1", OPTIMUM),
    Mutant(
        "brute force weighs by the decay of the pair's own token",
        WEIGHTS,
        "torch.cat([rows[-1] * now.unsqueeze(-1), torch.ones_like(now).unsqueeze(-1)], dim=-1)",
        "torch.cat([rows[-1], torch.ones_like(now).unsqueeze(-1)], dim=-1) * now.unsqueeze(-1)",
        OPTIMUM,
    ),
    Mutant(
        "the kernel takes the key for the query",
        WEIGHTS,
        "return self.kernel(q.unsqueeze(2), past.k)",
        "return self.kernel(past.k[:, :, -1:], past.k)",
        CLOSED,
    ),
    Mutant(
        "momentum is taken of the new velocity",
        SOLVER,
        "along(self.momentum, u) * u - along(self.rate, g) * g",
        "along(self.momentum, u) * (u - along(self.rate, g) * g)",
        CLOSED,
    ),
    Mutant(
        "the step goes up the slope", SOLVER, "* u - along(self.rate, g) * g", "* u + along(self.rate, g) * g", CLOSED
    ),
    Mutant(
        "decay forgets the step as well",
        SOLVER,
        "(1 - along(self.decay, w)) * w + u",
        "(1 - along(self.decay, w)) * (w + u)",
        CLOSED,
    ),
    Mutant(
        "only one of several steps is taken",
        SOLVER,
        "        for _ in range(self.steps):\n            slope = gradient",
        "        for _ in range(1):\n            slope = gradient",
        CLOSED,
    ),
    Mutant(
        "the implicit step is an explicit one",
        SOLVER,
        "torch.linalg.pinv(rest * identity + small * gram, hermitian=True)",
        "torch.linalg.pinv(identity, hermitian=True)",
        CLOSED,
    ),
    Mutant(
        "the implicit step does not know an infinite strength",
        SOLVER,
        "strong, 1 / torch.where(strong, beta, 1.0), 1.0",
        "strong, 0.5, 1.0",
        CLOSED,
    ),
    Mutant(
        "the implicit step's error has the wrong sign",
        SOLVER,
        "(memory(parameters, k) - v).flatten(2)",
        "(v - memory(parameters, k)).flatten(2)",
        CLOSED,
    ),
    Mutant(
        "a cross moment writes the opposite",
        SOLVER,
        "return tuple(w - g for w, g in zip(parameters, slope, strict=True)), velocity",
        "return tuple(w + g for w, g in zip(parameters, slope, strict=True)), velocity",
        CLOSED,
    ),
    Mutant(
        "a cross moment forgets its weights",
        SOLVER,
        "(gamma * alignment(memory(inner, k), v))",
        "alignment(memory(inner, k), v)",
        closed("test_a_cross_moment_weighs_pairs_by_a_kernel"),
    ),
    Mutant(
        "the optimum forgets its weights",
        SOLVER,
        "(gamma * squared_error(memory(inner, k), v))",
        "squared_error(memory(inner, k), v)",
        OPTIMUM,
    ),
    Mutant("the ridge lacks its half", SOLVER, "ridge * 0.5 * inner[0].square()", "ridge * inner[0].square()", OPTIMUM),
    Mutant(
        "the ridge is that of another feature",
        SOLVER,
        "return self.ridge.unsqueeze(-1)",
        "return self.ridge.roll(1, -1).unsqueeze(-1)",
        closed("test_a_ridge_of_each_channel_is_a_gate"),
    ),
    Mutant(
        "the loss lacks its half",
        OBJECTIVE,
        "return 0.5 * (prediction - target)",
        "return (prediction - target)",
        CLOSED,
    ),
    Mutant("the loss is a mean over the value", OBJECTIVE, ".square().sum(-1)", ".square().mean(-1)", CLOSED),
    Mutant(
        "the inner slope is a constant to the outside",
        OBJECTIVE,
        "return torch.autograd.grad(objective(inner), inner, create_graph=tracked, materialize_grads=True)",
        "slopes = torch.autograd.grad(objective(inner), inner, create_graph=tracked, materialize_grads=True)\n"
        "        return tuple(slope.detach() for slope in slopes)",
        TWICE,
    ),
    Mutant(
        "the recipe reads before it writes",
        RECIPE,
        "o = self.memory(parameters, q.unsqueeze(2))",
        "o = self.memory(state.parameters or parameters, q.unsqueeze(2))",
        CLOSED,
    ),
    Mutant(
        "the recipe fades after the write",
        RECIPE,
        "solver.move(self.memory, weights.fade(parameters), velocity, keys, values)\n",
        "solver.move(self.memory, parameters, velocity, keys, values)\n"
        "            parameters = weights.fade(parameters)\n",
        CLOSED,
    ),
    Mutant(
        "the velocity is lost between tokens",
        RECIPE,
        "else parameters, velocity, past)",
        "else parameters, self._rest(parameters), past)",
        CLOSED,
    ),
    Mutant(
        "every token takes the first one's gates", RECIPE, "gate[t] for path, gate", "gate[0] for path, gate", CLOSED
    ),
    Mutant(
        "an MLP has an activation behind its last layer", MEMORY, "if layer + 1 < depth:", "if layer < depth:", CLOSED
    ),
    Mutant(
        "an MLP has no bias in its first layer",
        MEMORY,
        "x = x @ weight + bias.unsqueeze(-2)",
        "x = x @ weight + (layer > 0) * bias.unsqueeze(-2)",
        CLOSED,
    ),
    Mutant(
        "a kernel smoother is not constant", MEMORY, "return x.new_ones(*x.shape[:-1], 1)", "return x[..., :1]", CLOSED
    ),
    Mutant("brute force does not take the root of the weights", BRUTE, "root = gamma.sqrt()", "root = gamma", OPTIMUM),
    Mutant(
        "brute force does not take the root of the ridge",
        BRUTE,
        "math.sqrt(ridge)",
        "ridge",
        tests("recipe/test_recipe.py", "test_a_ridge_that_is_a_number_is_that_of_brute_force"),
    ),
    Mutant("a weighted mean is not divided", BRUTE, "/ torch.where(empty, 1.0, total) * ~empty", "* ~empty", OPTIMUM),
    Mutant(
        "conjugate gradients forget the last direction",
        GRADIENTS,
        "direction = torch.addcmul(step, size / before, direction)",
        "direction = step",
        CG,
    ),
    Mutant(
        "conjugate gradients step without their preconditioner",
        GRADIENTS,
        "else residual / diagonal",
        "else residual",
        CG,
    ),
    Mutant(
        "conjugate gradients start from nothing",
        GRADIENTS,
        "torch.zeros_like(rhs) if start is None else start",
        "torch.zeros_like(rhs)",
        CG,
    ),
)
