"""The former home of :mod:`functitan.autodiff_custom`: a module of that name would hide ``ft.custom_vjp``."""

from functitan.autodiff_custom import custom_vjp

__all__ = ["custom_vjp"]
