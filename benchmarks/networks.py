"""Inception V3, ResNet-101 and VGG-16 in numbers: parameters and multiplications of each layer, in forward order.

Architectures: arXiv:1512.00567 (without the auxiliary head, as tf_cnn_benchmarks trains it; batch normalisation after
every convolution), arXiv:1512.03385, arXiv:1409.1556; images of 299, 224 and 224 pixels, 1000 classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layer:
    """One layer with parameters."""

    #: Elements of each of its parameter tensors.
    tensors: tuple[int, ...]
    #: Multiplications for one image; the backward pass does twice as many.
    multiplications: int

    @property
    def num_parameters(self) -> int:
        """Of all its tensors."""
        return sum(self.tensors)


@dataclass
class Network:
    """A network that is being written down."""

    #: Width and height of what the next layer gets.
    size: int
    channels: int = 3
    layers: list[Layer] = field(default_factory=list)

    def conv(
        self,
        out: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        *,
        pad: bool = True,
        norm: bool = True,
        into: int = 0,
        keep: bool = False,
    ) -> int:
        """A convolution, with batch normalisation or with a bias; returns its channels.

        Args:
            out: its channels.
            kernel: its height and width.
            stride: its stride.
            pad: keeps the size, but for the stride.
            norm: batch normalisation instead of a bias.
            into: its input channels; those of the layer before by default.
            keep: what the next layer gets stays as it was: this one is on a branch.
        """
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        size = -(-self.size // stride) if pad else (self.size - height) // stride + 1
        weights = out * (into or self.channels) * height * width
        self.layers.append(Layer((weights, out, out) if norm else (weights, out), weights * size * size))
        if not keep:
            self.size, self.channels = size, out
        return out

    def pool(self, stride: int, *, pad: bool = True, kernel: int = 3) -> None:
        """A pooling layer."""
        self.size = -(-self.size // stride) if pad else (self.size - kernel) // stride + 1

    def dense(self, inputs: int, outputs: int) -> None:
        """A fully connected layer."""
        self.layers.append(Layer((inputs * outputs, outputs), inputs * outputs))

    def branches(self, *branches: list[tuple[int, int | tuple[int, int]]], more: int = 0, stride: int = 1) -> None:
        """Branches of convolutions side by side, their channels concatenated with ``more`` of what came in.

        With a stride, the last convolution of each branch has it, without padding.
        """
        total, size = more, self.size
        for branch in branches:
            channels = self.channels
            for number, (out, kernel) in enumerate(branch):
                is_last = number == len(branch) - 1 and stride > 1
                options = {"stride": stride, "pad": False} if is_last else {}
                channels = self.conv(out, kernel, into=channels, keep=True, **options)  # type: ignore[arg-type]
            total += channels
        self.channels = total
        self.size = (size - 3) // stride + 1 if stride > 1 else size


def vgg16() -> list[Layer]:
    net = Network(224)
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.conv(width, 3, norm=False)
        net.pool(2)
    net.dense(512 * 7 * 7, 4096)
    net.dense(4096, 4096)
    net.dense(4096, 1000)
    return net.layers


def resnet101() -> list[Layer]:
    net = Network(224)
    net.conv(64, 7, stride=2)
    net.pool(2)
    for width, count, stage_stride in ((64, 3, 1), (128, 4, 2), (256, 23, 2), (512, 3, 2)):
        for block in range(count):
            stride = stage_stride if block == 0 else 1
            if block == 0:
                net.conv(4 * width, 1, stride=stride, keep=True)
            net.conv(width, 1)
            net.conv(width, 3, stride=stride)
            net.conv(4 * width, 1)
    net.dense(2048, 1000)
    return net.layers


def inception_v3() -> list[Layer]:
    net = Network(299)
    net.conv(32, 3, stride=2, pad=False)
    net.conv(32, 3, pad=False)
    net.conv(64, 3)
    net.pool(2, pad=False)
    net.conv(80, 1)
    net.conv(192, 3, pad=False)
    net.pool(2, pad=False)
    for pooled in (32, 64, 64):
        net.branches([(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], [(pooled, 1)])
    net.branches([(384, 3)], [(64, 1), (96, 3), (96, 3)], more=net.channels, stride=2)
    row, column = (1, 7), (7, 1)
    for width in (128, 160, 160, 192):
        net.branches(
            [(192, 1)],
            [(width, 1), (width, row), (192, column)],
            [(width, 1), (width, column), (width, row), (width, column), (192, row)],
            [(192, 1)],
        )
    net.branches([(192, 1), (320, 3)], [(192, 1), (192, row), (192, column), (192, 3)], more=net.channels, stride=2)
    for _ in range(2):
        before = net.channels
        # Two branches fork at their end.
        net.branches([(320, 1)], [(384, 1), (384, (1, 3))], [(448, 1), (384, 3), (384, (1, 3))], [(192, 1)])
        for _ in range(2):
            net.conv(384, (3, 1), into=384, keep=True)
        assert net.channels == 320 + 384 + 384 + 192, before
        net.channels = 2048
    net.dense(2048, 1000)
    return net.layers
