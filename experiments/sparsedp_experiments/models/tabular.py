"""Models for tables and for hashed counts of words."""

from __future__ import annotations

from torch import nn

from sparsedp_experiments.models.heads import InputShape, check_shape, classifier_head, flat_size


def logistic(input_shape: InputShape, classes: int) -> nn.Sequential:
    """Logistic regression, started at zero: `features + 1` parameters for two classes.

    It is convex, so a random start would add nothing but a starting error.
    """
    flatten = nn.Flatten()
    head = classifier_head(flat_size(flatten, input_shape), classes)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(flatten, head)


def mlp(input_shape: InputShape, classes: int, hidden: tuple[int, ...] = (64,)) -> nn.Sequential:
    """A multilayer perceptron with Tanh."""
    layers: list[nn.Module] = [nn.Flatten()]
    size = flat_size(layers[0], input_shape)
    for width in hidden:
        layers += [nn.Linear(size, width), nn.Tanh()]
        size = width
    return nn.Sequential(*layers, classifier_head(size, classes))


def bag_of_words(input_shape: InputShape, classes: int) -> nn.Sequential:
    """A linear classifier on a hashed bag of words: 16,385 parameters for 2^14 buckets and two classes."""
    check_shape(input_shape, axes=1)
    return logistic(input_shape, classes)
