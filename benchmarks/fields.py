"""Plans models of other fields than language, and prints the table of docs/fields.md.

python benchmarks/fields.py [--save] [MODEL ...]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
from fields_models.clip import CLIP
from fields_models.dlrm import DLRM
from fields_models.swin import Swin
from fields_models.unet import UNet
from paddle import nn
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.spelling import spell_bytes, spell_degrees, spell_seconds

RESULTS = Path(__file__).parent / "results" / "fields.md"
CLUSTERS = {"1x8:A100-80G": 1, "2x8:A100-80G": 2}
"""Each cluster, and by how much the batch grows on it."""
Specs = list[InputSpec]


@dataclass(frozen=True)
class Case:
    """A model that is trained on a global batch of ``batch`` samples on eight devices."""

    build: Callable[[], nn.Layer]
    batch: int
    inputs: Callable[[int], Specs]
    labels: Callable[[int], Specs] = lambda b: [InputSpec([b, 1], "int64", "labels")]
    loss: Callable[[], Any] | None = nn.CrossEntropyLoss


def images(size: int) -> Callable[[int], Specs]:
    return lambda b: [InputSpec([b, 3, size, size], "float32", "images")]


def named(name: str) -> Callable[[], nn.Layer]:
    return lambda: getattr(paddle.vision.models, name)()


CASES = {
    "ResNet-50": Case(named("resnet50"), 2048, images(224)),
    "VGG-16": Case(named("vgg16"), 2048, images(224)),
    "MobileNetV3 large": Case(named("mobilenet_v3_large"), 2048, images(224)),
    "DenseNet-121": Case(named("densenet121"), 2048, images(224)),
    "UNet, 512 x 512": Case(UNet, 128, images(512), lambda b: [InputSpec([b, 512, 512, 1], "int64", "labels")]),
    "Swin-T": Case(Swin, 1024, images(224)),
    "CLIP ViT-B/32": Case(
        CLIP,
        4096,
        lambda b: [*images(224)(b), InputSpec([b, 77], "int64", "texts"), InputSpec([b, 1], "int64", "pairs")],
        lambda b: [],
        None,
    ),
    "DLRM, 26 tables": Case(
        DLRM,
        65536,
        lambda b: [InputSpec([b, 13], "float32", "numbers"), InputSpec([b, 26], "int64", "categories")],
        lambda b: [InputSpec([b, 1], "float32", "clicks")],
        nn.BCEWithLogitsLoss,
    ),
}


def planned(case: Case, cluster: str) -> rbt.Plan:
    """The plan of a model in bf16, with nothing asked for but the batch."""
    batch = case.batch * CLUSTERS[cluster]
    with paddle.LazyGuard():
        model = case.build()
    return rbt.tune(
        model,
        input_spec=case.inputs(batch),
        labels_spec=case.labels(batch),
        loss=case.loss() if case.loss else None,
        cluster=cluster,
        precision="bf16",
    )


def row(name: str, cluster: str, plan: rbt.Plan) -> str:
    rate = plan.global_batch / plan.estimate.step_time_s
    cells = (
        *(name, f"`{cluster}`", str(plan.global_batch), spell_degrees(plan.degrees), f"{plan.micro_batch}"),
        *(str(plan.accumulate_steps), plan.recompute, str(plan.sharding_stage), spell_seconds(plan.estimate.step_time_s)),
        *(f"{rate:,.0f}", spell_bytes(plan.estimate.peak_memory_bytes)),
    )
    return f"| {' | '.join(cells)} |"


def table(names: Sequence[str]) -> str:
    """A row for each model and cluster."""
    head = "| model | cluster | batch | degrees | micro batch | steps | recompute | ZeRO | step | samples/s | memory |"
    rows = (row(name, cluster, planned(CASES[name], cluster)) for name in names for cluster in CLUSTERS)
    return "\n".join([head, "|" + "---|" * 11, *rows]) + "\n"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="some of the models; all of them where none is named")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}, which the documentation shows")
    chosen = parser.parse_args(arguments)
    found = table(chosen.models or list(CASES))
    if chosen.save:
        RESULTS.write_text(found, encoding="utf-8")
    print(found, end="")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
