"""Who answers for an operation, and one spelling of each currency.

"usd" and "USD" were two currencies to a ceiling and to a limit on sums. A limit that would then stand twice on one place
keeps its spelling: limits are compared without regard to it.
"""

import django.contrib.postgres.fields
from django.db import migrations, models

OPERATIONS = "UPDATE reconciliation_operation SET currency = upper(currency) WHERE currency <> upper(currency)"
LIMITS = """
UPDATE reconciliation_limit l SET currency = upper(l.currency) WHERE l.currency <> upper(l.currency)
   AND (l.lifted_at IS NOT NULL OR NOT EXISTS (SELECT 1 FROM reconciliation_limit o WHERE o.id <> l.id
        AND o.lifted_at IS NULL AND upper(o.currency) = upper(l.currency)
        AND o.window_seconds IS NOT DISTINCT FROM l.window_seconds
        AND (o.kind, o.tenant, o.provider, o.action, o.workflow_type)
          = (l.kind, l.tenant, l.provider, l.action, l.workflow_type)))
"""


class Migration(migrations.Migration):
    dependencies = [("reconciliation", "0015_signals_told")]

    operations = [
        migrations.AddField(
            model_name="operation",
            name="owners",
            field=django.contrib.postgres.fields.ArrayField(
                base_field=models.CharField(max_length=120), default=list, size=None
            ),
        ),
        migrations.RunSQL(OPERATIONS, migrations.RunSQL.noop),
        migrations.RunSQL(LIMITS, migrations.RunSQL.noop),
    ]
