"""Stand-in for torchvision: SGLang and transformers import names from it that only multimodal models use, and PyPI's
build needs a CUDA torch. Every name exists; using one raises."""

__version__ = "0.28.0+cpu.standin"


def missing_names(module):
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise NotImplementedError(f"{module}.{name}: image input needs a real torchvision")

        return missing

    return __getattr__
