from django.db import models


class Outcome(models.Model):
    """How a claim ended, in the desk's own words."""

    order_id = models.CharField(max_length=40)
    outcome = models.CharField(max_length=40)
